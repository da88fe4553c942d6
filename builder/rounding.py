"""Rounding a weight matrix to FP8 so that its products with real inputs change least, not its entries.

Columns are rounded one after the other, and the error of each is made up for in the columns that are still to come, as
far as the inputs of calibration tell how they go together: GPTQ (Frantar et al., arXiv 2210.17323) with E4M3 as the
grid. The format and its scales stay what they are.
"""

import torch

from magicdec.plugins.fp8 import FP8, from_fp8, to_fp8

# Share of the mean squared input that is added to every input's own, against singular matrices (the paper's 1 %).
_DAMPING = 0.01
_BLOCK = 128  # columns whose errors are carried over to the rest in one product


def round_to_fp8(weight: torch.Tensor, scale: float, inputs: "InputStatistics") -> torch.Tensor:
    """E4M3 of weight / scale; weight: [out_features, in_features] float32."""
    order, factor = inputs.order, inputs.factor
    rest = weight[:, order] / scale
    out = torch.empty_like(rest, dtype=FP8)
    for start in range(0, rest.shape[1], _BLOCK):
        stop = min(start + _BLOCK, rest.shape[1])
        block, errors = rest[:, start:stop], []
        for column in range(stop - start):
            rounded = to_fp8(block[:, column], 1.0)
            out[:, start + column] = rounded
            row = factor[start + column, start + column : stop]
            error = (block[:, column] - from_fp8(rounded, torch.float32)) / row[0]
            block[:, column:] -= error[:, None] * row
            errors.append(error)
        rest[:, stop:] -= torch.stack(errors, dim=1) @ factor[start:stop, stop:]
    return out.view(torch.uint8)[:, order.argsort()].view(FP8)


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
