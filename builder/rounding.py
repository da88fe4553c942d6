"""Rounding a weight matrix to few bits so that its products with real inputs change least, not its entries.

Columns are rounded one after the other, and the error of each is made up for in the columns that are still to come, as
far as the inputs of calibration tell how they go together: GPTQ (Frantar et al., arXiv 2210.17323) over any grid of
numbers. Formats and their scales stay what they are.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from magicdec.plugins.fp8 import from_fp8, to_fp8
from magicdec.plugins.weight_only import GROUP, INT4_MAX, INT8_MAX, int4_scales, int8_scales, to_int4, to_int8

# Share of the mean squared input that is added to every input's own, against singular matrices (the paper's 1 %).
_DAMPING = 0.01
_BLOCK = 32  # columns whose errors are carried over to the rest in one product


class Grid(Protocol):
    """The numbers that a matrix [out_features, in_features] may be made of."""

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        """The grid's nearest numbers to one column [out_features], float32."""
        ...


class Fp8Grid:
    """E4M3's numbers themselves."""

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:  # noqa: ARG002 - the same for all columns
        return from_fp8(to_fp8(values, 1.0), torch.float32)


@dataclass(frozen=True)
class StepGrid:
    """Equal steps: q * scale + offset for whole numbers q from `least` to `largest`.

    scales, offsets: float32 [out_features, groups], each for `group` neighbouring columns.
    """

    scales: torch.Tensor
    offsets: torch.Tensor
    least: int
    largest: int
    group: int

    def nearest(self, values: torch.Tensor, column: int) -> torch.Tensor:
        scale, offset = self.scales[:, column // self.group], self.offsets[:, column // self.group]
        steps = torch.where(scale > 0, (values - offset) / scale, 0.0).round_().clamp_(self.least, self.largest)
        return steps * scale + offset


def round_to_fp8(weight: torch.Tensor, scale: float, inputs: "InputStatistics") -> torch.Tensor:
    """E4M3 of weight / scale; weight: [out_features, in_features] float32."""
    return to_fp8(round_to(Fp8Grid(), weight / scale, inputs), 1.0)


def round_to_int8(weight: torch.Tensor, inputs: "InputStatistics") -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales (see `plugins.weight_only`)."""
    scales = int8_scales(weight)
    grid = StepGrid(scales[:, None], torch.zeros(len(weight), 1), -INT8_MAX, INT8_MAX, weight.shape[1])
    return to_int8(round_to(grid, weight, inputs), scales), scales


def round_to_int4(weight: torch.Tensor, inputs: "InputStatistics") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and offsets (see `plugins.weight_only`). Scales are those of the weights before rounding."""
    scales, offsets = int4_scales(weight)
    grid = StepGrid(scales.float(), offsets.float(), 0, INT4_MAX, GROUP)
    return to_int4(round_to(grid, weight, inputs), scales, offsets), scales, offsets


def round_to(grid: Grid, weight: torch.Tensor, inputs: "InputStatistics") -> torch.Tensor:
    """A matrix of the grid's numbers, float32; weight: [out_features, in_features] float32."""
    order, factor = inputs.order, inputs.factor
    columns = order.tolist()
    rest = weight[:, order]
    out = torch.empty_like(rest)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        block, errors = rest[:, start:stop], []
        for column in range(stop - start):
            rounded = grid.nearest(block[:, column], columns[start + column])
            out[:, start + column] = rounded
            row = factor[start + column, start + column : stop]
            error = (block[:, column] - rounded) / row[0]
            block[:, column:] -= error[:, None] * row
            errors.append(error)
        rest[:, stop:] -= torch.stack(errors, dim=1) @ factor[start:stop, stop:]
    return out[:, order.argsort()]


class InputStatistics:
    """How the inputs of a linear layer go together, from their second moments [in_features, in_features].

    order: columns by falling size of their inputs, so that the costliest errors find the most columns to be made up in.
    factor: upper triangular Cholesky factor of the inverse moments, in that order; float32.
    """

    def __init__(self, moments: torch.Tensor) -> None:
        sizes = moments.diagonal()
        self.order = sizes.argsort(descending=True)
        damped = moments[self.order][:, self.order].double()
        damped.diagonal().add_(_DAMPING * sizes.double().mean().clamp_min(1e-30))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        self.factor = torch.linalg.cholesky(inverse, upper=True).float()
