"""Linear layers of the native library: weights laid out once, products by csrc/linear_kernels.cpp.

A row's result has the same bits whatever rows stand beside it and on any number of threads: see csrc/linear.h.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch.nn import functional

from magicdec.errors import EngineError
from magicdec.plugins.cpu.numbers import DTYPES
from magicdec.plugins.linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear
from magicdec.plugins.weight_only import GROUP

PANEL = 32
_INT8, _INT4 = 3, 4
_STORE, _GATE = 0, 2


class MatrixStruct(ctypes.Structure):
    """`Matrix` of csrc/linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "num_panels")),
        ("fp8_factor", ctypes.c_float),
        ("format", ctypes.c_int32),
    )


class RowsStruct(ctypes.Structure):
    """`Rows` of csrc/linear.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("fp8_factor", ctypes.c_float),
    )


class _ProductStruct(ctypes.Structure):
    _fields_ = (("finish", ctypes.c_int32), ("to", RowsStruct), ("columns", ctypes.c_int64))


class PackedLinear:
    """One matrix of the native library, made of one linear layer or of several with the same inputs.

    The layers' outputs stand one after the other. gated: of two layers, silu(first) * second is what is computed.
    The matrix owns its memory; the layers can be dropped. EngineError names what cannot be laid out.
    """

    def __init__(self, layers: Sequence[Linear], *, gated: bool = False) -> None:
        self.gated = gated
        counts = [len(part) for part in _column(layers, "weight")]
        self.columns = counts[0] if gated else sum(counts)
        self._scales: torch.Tensor | None = None
        self._panels, self.inputs, kind, factor = self._laid_out(layers)
        biases = [getattr(layer, "bias", None) for layer in layers]
        self._bias = None
        if any(bias is not None for bias in biases):
            wide = [torch.zeros(n) if bias is None else bias.float() for n, bias in zip(counts, biases, strict=True)]
            self._bias = self._rows(wide)
        self.struct = MatrixStruct(
            self._panels.data_ptr(),
            _address(self._scales),
            _address(self._bias),
            self.inputs,
            len(self._panels),
            factor,
            kind,
        )

    def _laid_out(self, layers: Sequence[Linear]) -> tuple[torch.Tensor, int, int, float]:
        """Panels, inputs, format, and what FP8 inputs are multiplied with before they are rounded."""
        weight = self._rows(_column(layers, "weight"))
        if all(isinstance(layer, DenseLinear) for layer in layers):
            return _panels(weight), weight.shape[1], DTYPES[weight.dtype], 0.0
        if all(isinstance(layer, Int8Linear) for layer in layers):
            self._scales = self._rows([scale.float() for scale in _column(layers, "scale")])
            return _paired(weight), weight.shape[1], _INT8, 0.0
        if all(isinstance(layer, Int4Linear) for layer in layers):
            scale, offset = (self._rows(_column(layers, name)) for name in ("scale", "offset"))
            return _int4_panels(weight, scale, offset), 2 * weight.shape[1], _INT4, 0.0
        scaled = [layer for layer in layers if isinstance(layer, Fp8Linear)]
        if len(scaled) < len(layers):
            raise EngineError("linear layers that share their inputs are stored in different formats")
        factors = [torch.full((len(layer.weight),), layer.weight_scale * layer.input_scale) for layer in scaled]
        self._scales = self._rows(factors)
        panels = _panels(weight.to(torch.bfloat16))
        return panels, weight.shape[1], DTYPES[torch.bfloat16], _fp8_factor(scaled)

    @property
    def num_bytes(self) -> int:
        """Memory that a product reads."""
        return self._panels.nbytes

    def _rows(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The layers' rows in the order of the panels, with rows of zeros up to whole ones."""
        if not self.gated:
            return _padded(torch.cat(parts), PANEL)
        halves = [_split(_padded(part, PANEL // 2), 0, PANEL // 2) for part in parts]
        return torch.cat(halves, dim=1).flatten(0, 1)


def linear(library: ctypes.CDLL, matrix: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """What the layers make of rows x [T, inputs]: float32 [T, columns]; with `gated` in x's dtype.

    x: float32, bfloat16 or float16; for FP8 layers E4M3 numbers already, in bfloat16.
    """
    out = torch.empty(len(x), matrix.columns, dtype=x.dtype if matrix.gated else torch.float32)
    x = x.contiguous()
    rows = RowsStruct(x.data_ptr(), x.shape[1], DTYPES[x.dtype], 0.0)
    to = RowsStruct(out.data_ptr(), out.shape[1], DTYPES[out.dtype], 0.0)
    product = _ProductStruct(_GATE if matrix.gated else _STORE, to, matrix.columns)
    library.magicdec_linear(*map(ctypes.byref, (matrix.struct, rows)), ctypes.c_int64(len(x)), ctypes.byref(product))
    return out


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """[rows, inputs] to panels [panels, bytes]."""
    if weight.dtype == torch.bfloat16:
        return _paired(weight)
    panels = _split(weight, 0, PANEL).transpose(1, 2)
    return panels.contiguous().flatten(1).view(torch.uint8)


def _paired(weight: torch.Tensor) -> torch.Tensor:
    """The same with two inputs of an output side by side."""
    if weight.shape[1] % 2:
        raise EngineError(f"a linear layer with an odd number of inputs ({weight.shape[1]})")
    panels = _split(_split(weight, 1, 2), 0, PANEL).transpose(1, 2)
    return panels.contiguous().flatten(1).view(torch.uint8)


def _int4_panels(weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, inputs / 2], scales and offsets [rows, groups] to panels [panels, bytes]."""
    words = _split(torch.stack([weight & 15, weight >> 4], 1), 2, 4)  # [rows, parity, words, 4]
    halves = words[..., ::2] | words[..., 1::2] << 4  # [rows, parity, words, 2 bytes]
    by_group = _split(halves.transpose(1, 2).flatten(2), 1, GROUP // 8)  # [rows, groups, 4 words, 4 bytes]
    numbers = _split(by_group, 0, PANEL).permute(0, 2, 3, 1, 4).flatten(2)  # [panels, groups, 4 * 32 * 4]
    ends = [_split(part, 0, PANEL).transpose(1, 2).contiguous().view(torch.uint8) for part in (scale, offset)]
    return torch.cat([numbers, *ends], dim=2).flatten(1)


def _split(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Dimension `dim` as two: pieces of `size`."""
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def _padded(rows: torch.Tensor, to: int) -> torch.Tensor:
    missing = -len(rows) % to
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _fp8_factor(layers: Sequence[Fp8Linear]) -> float:
    scales = {layer.input_scale for layer in layers}
    if len(scales) > 1:
        raise EngineError(f"FP8 layers that share their inputs have different input scales {sorted(scales)}")
    return 1.0 / scales.pop()


def _column(layers: Sequence[Linear], name: str) -> list[torch.Tensor]:
    return [getattr(layer, name) for layer in layers]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
