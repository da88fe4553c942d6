"""Linear layers of a checkpoint: one object a layer, so that a quantised one is only another kind of object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magicdec.plugins.fp8 import from_fp8, to_fp8
from magicdec.plugins.weight_only import from_int4, from_int8


class Linear(Protocol):
    """Maps rows [T, in_features] to [T, out_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class DenseLinear:
    """Plain weights [out_features, in_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Fp8Linear:
    """FP8 weights and inputs with one static scale each, the arithmetic of FP8 matrix units emulated.

    weight: E4M3 numbers [out_features, in_features], held in `product_dtype`. A product of two such numbers has eight
    bits and is exact there; sums are float32 (float64: exact as well, whatever the order, since no sum of less than
    2^17 products needs more than 53 bits), and the scales are applied to them.
    """

    weight: torch.Tensor
    weight_scale: float
    input_scale: float
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(fp8(x) @ weight.T) * scales + bias, in x's dtype."""
        rows = from_fp8(to_fp8(x, self.input_scale), self.weight.dtype)
        out = functional.linear(rows, self.weight)
        out = out.to(torch.promote_types(out.dtype, torch.float32)) * (self.weight_scale * self.input_scale)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)


@dataclass(frozen=True)
class Int8Linear:
    """int8 weights with a scale a row; inputs and sums as in a dense layer (see `plugins.weight_only`).

    weight: int8 [out_features, in_features]; scale: float32 [out_features].
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ (weight * scale).T + bias, in x's dtype. The matrix is made anew at each call."""
        return functional.linear(x, from_int8(self.weight, self.scale, x.dtype), self.bias)


@dataclass(frozen=True)
class Int4Linear:
    """int4 weights with a scale and an offset for every 32 columns of a row (see `plugins.weight_only`).

    weight: uint8 [out_features, in_features / 2], the even column in the low half of a byte; scale, offset: float16
    [out_features, in_features / 32]. An entry q in 0..15 stands for q * scale + offset.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x @ (weight * scale + offset).T + bias, in x's dtype. The matrix is made anew at each call."""
        return functional.linear(x, from_int4(self.weight, self.scale, self.offset, x.dtype), self.bias)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What FP8 products are made in when the model computes in `dtype`; unscaled sums would overflow float16."""
    return torch.float32 if dtype == torch.float16 else dtype


def load_linear(weights: Mapping[str, torch.Tensor], prefix: str) -> Linear:
    """The linear layer whose tensors are named `prefix` + "weight", "bias", and scales by how the weight is stored."""
    weight, bias = weights[prefix + "weight"], weights.get(prefix + "bias")
    scale = weights.get(prefix + "weights_scaling_factor")
    if scale is None:
        return DenseLinear(weight, bias)
    if weight.dtype == torch.int8:
        return Int8Linear(weight, scale, bias)
    if weight.dtype == torch.uint8:
        return Int4Linear(weight, scale, weights[prefix + "weights_offset"], bias)
    return Fp8Linear(weight, scale.item(), weights[prefix + "activation_scaling_factor"].item(), bias)


@dataclass(frozen=True)
class Embedding:
    """Rows by token id. table: [vocab, hidden]; scale: None, or of an int8 table one a row, float32 [vocab]."""

    table: torch.Tensor
    scale: torch.Tensor | None = None

    def __call__(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T] -> [T, hidden] in `dtype`."""
        if self.scale is None:
            return functional.embedding(token_ids, self.table).to(dtype)
        return from_int8(self.table[token_ids], self.scale[token_ids], dtype)


def load_embedding(weights: Mapping[str, torch.Tensor], prefix: str) -> Embedding:
    """The embedding whose tensors are named `prefix` + "weight", and "weights_scaling_factor" if it is int8."""
    return Embedding(weights[prefix + "weight"], weights.get(prefix + "weights_scaling_factor"))
