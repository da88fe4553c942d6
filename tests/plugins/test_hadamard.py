"""The turn of keys in an FP8 cache: exact, orthogonal in pairs, and worth its while."""

import pytest
import torch

from magicdec.plugins.fp8 import from_fp8, to_fp8
from magicdec.plugins.hadamard import Hadamard


@pytest.mark.parametrize("head_size", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_keys_are_the_same_in_exact_arithmetic(head_size: int, dtype: torch.dtype) -> None:
    turn = Hadamard(head_size, dtype)
    keys, queries = turn.to_keys.double(), turn.to_queries.double()
    assert torch.equal(keys @ queries.T, torch.eye(head_size, dtype=torch.float64))
    numbers = torch.randint(-3, 4, (2, 5, head_size), generator=torch.Generator().manual_seed(0)).double()
    wide = Hadamard(head_size, torch.float64)
    assert torch.equal(wide.queries(numbers[0]) @ wide.keys(numbers[1]).T, numbers[0] @ numbers[1].T)
    assert torch.equal(wide.turn_back(wide.keys(numbers[0])), numbers[0])


def test_a_large_constant_channel_costs_less() -> None:
    """As measured in SmolLM2: one channel far from zero in all keys, and queries that are large there."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(2, 500, 64, generator=generator).unbind()
    keys[:, 5] -= 13
    queries[:, 5] += 4

    def loss(queries: torch.Tensor, keys: torch.Tensor) -> float:
        scale = keys.abs().max().item() / 448
        stored = from_fp8(to_fp8(keys, scale), torch.float32) * scale
        error = queries @ (stored - keys).T
        return float((error - error.mean(1, keepdim=True)).square().mean())  # softmax does not see the mean

    turn = Hadamard(64, torch.float32)
    assert loss(turn.queries(queries), turn.keys(keys)) < 0.5 * loss(queries, keys)
