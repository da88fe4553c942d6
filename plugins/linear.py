"""Linear layers of a checkpoint: one object a layer, so that a quantised one is only another kind of object."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional


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


def load_linear(weights: Mapping[str, torch.Tensor], prefix: str) -> Linear:
    """The linear layer whose tensors are named `prefix` + "weight", "bias"."""
    return DenseLinear(weights[prefix + "weight"], weights.get(prefix + "bias"))
