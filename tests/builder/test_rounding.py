"""Rounding by calibration over any grid: int8 and int4 as they are stored, and never worse off than the nearest."""

from collections.abc import Callable

import pytest
import torch

from magicdec.builder.rounding import InputStatistics, round_to_int4, round_to_int8
from magicdec.plugins.weight_only import from_int4, from_int8, int4_scales, int8_scales, to_int4, to_int8

Stored = tuple[torch.Tensor, ...]
KINDS = ("int8", "int4")


def nearest(kind: str, weight: torch.Tensor) -> Stored:
    if kind == "int8":
        return to_int8(weight, int8_scales(weight)), int8_scales(weight)
    return to_int4(weight, *int4_scales(weight)), *int4_scales(weight)


def numbers(kind: str, stored: Stored) -> torch.Tensor:
    if kind == "int8":
        data, scales = stored
        return from_int8(data, scales, torch.float32)
    data, scales, offsets = stored
    return from_int4(data, scales, offsets, torch.float32)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(24, 192, generator=torch.Generator().manual_seed(0))


def rounded(kind: str, weight: torch.Tensor, moments: torch.Tensor) -> Stored:
    rounder: dict[str, Callable[..., Stored]] = {"int8": round_to_int8, "int4": round_to_int4}
    return rounder[kind](weight, InputStatistics(moments))


@pytest.mark.parametrize("kind", KINDS)
def test_products_change_less_than_by_rounding_to_the_nearest(kind: str, weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 12, generator=generator) @ torch.randn(12, 192, generator=generator)
    x += 0.1 * torch.randn(512, 192, generator=generator)

    def loss(stored: Stored) -> float:
        return float((x @ (numbers(kind, stored) - weight).T).square().mean())

    assert loss(rounded(kind, weight, x.T @ x)) < 0.3 * loss(nearest(kind, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", [torch.zeros(192, 192), torch.eye(192)], ids=["never used", "unrelated inputs"])
def test_without_anything_to_make_up_for_it_is_the_nearest(
    kind: str, weight: torch.Tensor, moments: torch.Tensor
) -> None:
    pairs = zip(rounded(kind, weight, moments), nearest(kind, weight), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_the_grid_already_stays(kind: str, weight: torch.Tensor) -> None:
    x = torch.randn(512, 192, generator=torch.Generator().manual_seed(1))
    stored = nearest(kind, weight)
    again = rounded(kind, numbers(kind, stored), x.T @ x)
    assert torch.equal(numbers(kind, again), numbers(kind, stored))
