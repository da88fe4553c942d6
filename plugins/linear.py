"""Linear layers of a checkpoint: one object a layer, so that a quantised one is only another kind of object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magicdec.plugins.fp8 import from_fp8, to_fp8


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


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What FP8 products are made in when the model computes in `dtype`; unscaled sums would overflow float16."""
    return torch.float32 if dtype == torch.float16 else dtype


def load_linear(weights: Mapping[str, torch.Tensor], prefix: str) -> Linear:
    """The linear layer whose tensors are named `prefix` + "weight", "bias", and TensorRT-LLM's scales if it is FP8."""
    weight, bias = weights[prefix + "weight"], weights.get(prefix + "bias")
    if prefix + "weights_scaling_factor" not in weights:
        return DenseLinear(weight, bias)
    weight_scale, input_scale = (weights[f"{prefix}{name}_scaling_factor"].item() for name in ("weights", "activation"))
    return Fp8Linear(weight, weight_scale, input_scale, bias)
