"""The native paged attention kernel on tensors; csrc/attention.h says what it does and why a row's bits are its own."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

from magicdec.plugins.cpu.numbers import CACHE_DTYPES
from magicdec.plugins.fp8 import FP8

MAX_HEAD_SIZE = 1024
_NAMES = {number: dtype for dtype, number in CACHE_DTYPES.items()}


class _Sequence(ctypes.Structure):
    _fields_ = (
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("cache_len", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("tree", ctypes.c_void_p),
    )


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "keys", "values", "sequences")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_heads", "num_kv_heads", "head_size", "block_size")),
        *((name, ctypes.c_int64) for name in ("query_stride", "out_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("query_type", "cache_type")),
        ("value_scale", ctypes.c_float),
    )


class PagedSequences:
    """The sequences of a pass as the kernel reads them: made once, used for every layer.

    query_start_loc: [B + 1]; cache_lens: [B] entries before the new rows; blocks: [B] rows of the block table;
    trees: for each sequence None (row i sees the new rows up to itself) or a bool tensor [rows, rows] (row, seen).
    """

    def __init__(
        self,
        query_start_loc: Sequence[int],
        cache_lens: Sequence[int],
        blocks: Sequence[Sequence[int]],
        block_size: int,
        trees: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self.block_size, self.count = block_size, len(cache_lens)
        trees = trees or [None] * self.count
        lengths = [-(-(n + b - a) // block_size) for a, b, n in self._spans(query_start_loc, cache_lens)]
        for row, length in zip(blocks, lengths, strict=True):
            if len(row) < length:
                raise ValueError(f"a block table of {len(row)} blocks of {block_size} is short of {length - len(row)}")
        flat = [block for row, length in zip(blocks, lengths, strict=True) for block in row[:length]]
        self._table = torch.tensor(flat, dtype=torch.int32)
        self.last_block = max(flat, default=-1)
        self._trees = [None if tree is None else tree.to(torch.uint8).contiguous() for tree in trees]
        starts = [0, *accumulate(lengths)]
        self._array = (_Sequence * self.count)()
        for i, (a, b, n) in enumerate(self._spans(query_start_loc, cache_lens)):
            tree = self._trees[i]
            self._array[i] = _Sequence(
                first_row=a,
                num_rows=b - a,
                cache_len=n,
                blocks=self._table.data_ptr() + 4 * starts[i],
                tree=None if tree is None else tree.data_ptr(),
            )
        self.num_rows = query_start_loc[-1]
        self.address = ctypes.addressof(self._array)

    @staticmethod
    def _spans(query_start_loc: Sequence[int], cache_lens: Sequence[int]) -> list[tuple[int, int, int]]:
        return list(zip(query_start_loc[:-1], query_start_loc[1:], cache_lens, strict=True))


def supports(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernel knows these tensors: on the CPU, float32 / bfloat16 / float16 over the same or over FP8."""
    known = query.dtype in CACHE_DTYPES and query.dtype != FP8 and keys.dtype in (query.dtype, FP8)
    return known and query.device.type == keys.device.type == "cpu" and query.shape[-1] <= MAX_HEAD_SIZE


def paged_attention(
    library: ctypes.CDLL,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: PagedSequences,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """`plugins.attention.paged_attention` by the native kernels; the result is multiplied with value_scale."""
    query = query.contiguous()
    out = torch.empty_like(query)
    run_kernel(library, kernel_args(query, out, keys, values, sequences, value_scale))
    return out


def kernel_args(
    query: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequences: PagedSequences,
    value_scale: float = 1.0,
) -> ctypes.Structure:
    """What the kernel is called with; it keeps the tensors alive. query, out: contiguous."""
    num_kv_heads, num_slots, head_size = keys.shape
    num_rows, num_heads, _ = query.shape
    if (sequences.last_block + 1) * sequences.block_size > num_slots or num_rows < sequences.num_rows:
        raise ValueError(
            f"block {sequences.last_block} of {sequences.block_size} slots or row {sequences.num_rows - 1} is outside "
            f"a cache of {num_slots} slots or a query of {num_rows} rows"
        )
    if num_heads % num_kv_heads or values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(f"{num_heads} heads over keys {tuple(keys.shape)} and values {tuple(values.shape)}")
    if not (_dense(keys) and _dense(values) and keys.stride(0) == values.stride(0)):
        raise ValueError("keys and values must lie row after row within a KV head, in the same way")
    stride = num_heads * head_size
    args = _Args(
        *(tensor.data_ptr() for tensor in (query, out, keys, values)),
        *(sequences.address, sequences.count, num_heads, num_kv_heads, head_size, sequences.block_size),
        *(stride, stride, keys.stride(0), CACHE_DTYPES[query.dtype], CACHE_DTYPES[keys.dtype], value_scale),
    )
    args.owners = query, out, keys, values, sequences
    return args


def run_kernel(library: ctypes.CDLL, args: ctypes.Structure) -> None:
    """One pass of the kernel over what `kernel_args` has put together."""
    if library.magicdec_attention(ctypes.byref(args)):
        raise ValueError(f"no kernel for {_NAMES[args.query_type]} over {_NAMES[args.cache_type]}")


def _dense(cache: torch.Tensor) -> bool:
    return cache.stride()[1:] == (cache.shape[2], 1)
