"""The acceptance functions one by one: corners that the joint law has too little probability to show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.runtime.sampling import acceptance as rejection
from magicdec.runtime.sampling.acceptance import VerifyOutput, one_hot_probs
from tests.support import one_request
from tests.support.law import ALMOST_ONE, one_hot
from tests.support.one_request import coupled_sample, rejection_sample, sample

FLOATS = [torch.float32, torch.float64]
DTYPES = pytest.mark.parametrize("dtype", FLOATS)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0)), min_size=2, max_size=6).filter(any)
DRAWS = st.one_of(st.sampled_from([0.0, ALMOST_ONE, 1 - 2.0**-24]), st.floats(0, ALMOST_ONE))


def probs_of(weights: list[float], dtype: torch.dtype) -> torch.Tensor:
    made = torch.tensor(weights, dtype=torch.float64)
    return (made / made.sum()).to(dtype)


@DTYPES
def test_draw_of_zero_never_accepts_what_the_target_excludes(dtype: torch.dtype) -> None:
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=dtype)
    draft = torch.tensor([[0.9, 0.1]], dtype=dtype)
    assert rejection_sample(target, draft, [0], [0.0], [0.0, 0.0]) == VerifyOutput(0, (1,))


@DTYPES
def test_identical_rows_accept_all_but_the_last_ulp(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]], dtype=dtype)
    assert rejection_sample(rows, rows[:1], [1], [1 - 2.0**-50], [0.5, 0.1]) == VerifyOutput(1, (1, 0))


def test_greedy_takes_the_targets_choice_for_any_draws() -> None:
    target = torch.stack([one_hot(t, 4) for t in (2, 0, 3)])
    draft = torch.full((2, 4), 0.25, dtype=torch.float64)
    for draw in (0.0, 0.5, ALMOST_ONE):
        assert rejection_sample(target, draft, [2, 0], [draw] * 2, [draw] * 3) == VerifyOutput(2, (2, 0, 3))
        assert rejection_sample(target, draft, [2, 1], [draw] * 2, [draw] * 3) == VerifyOutput(1, (2, 0))
        assert rejection_sample(target, draft, [1, 0], [draw] * 2, [draw] * 3) == VerifyOutput(0, (2,))


@settings(deadline=None)
@given(
    best=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    guesses=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    draw=DRAWS,
    noise=st.floats(-5, 40),
)
def test_greedy_is_one_and_the_same_in_both_rules(
    best: list[int], guesses: list[int], draw: float, noise: float
) -> None:
    k = len(best) - 1
    target, drafts = one_hot_probs(best, 4, torch.float64), guesses[:k]
    noises = torch.full((k + 1, 4), noise, dtype=torch.float64)
    draft_probs = one_hot_probs(drafts, 4, torch.float64)
    rejected = rejection_sample(target, draft_probs, drafts, [draw] * k, [draw] * (k + 1))
    assert rejected == coupled_sample(target, drafts, noises)
    assert rejected.token_ids == tuple(best[: rejected.num_accepted + 1])


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 1), (0.24, 1), (0.25, 3), (0.99, 3), (ALMOST_ONE, 3)])
def test_sample_inverts_the_cumulative_sum(draw: float, expected: int) -> None:
    assert sample(torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]), draw) == expected


def test_sample_scales_an_unnormalised_row() -> None:
    assert [sample(torch.tensor([1.0, 3.0]), u) for u in (0.2, 0.3)] == [0, 1]


@settings(deadline=None)
@given(weights=WEIGHTS, draw=DRAWS, dtype=st.sampled_from(FLOATS))
def test_sample_never_gives_a_token_of_probability_zero(weights: list[float], draw: float, dtype: torch.dtype) -> None:
    probs = probs_of(weights, dtype)
    assert probs[sample(probs, draw)] > 0


@settings(deadline=None)
@given(target=WEIGHTS, draft=WEIGHTS, draws=st.tuples(DRAWS, DRAWS, DRAWS), dtype=st.sampled_from(FLOATS))
def test_no_output_token_is_one_that_the_target_excludes(
    target: list[float], draft: list[float], draws: tuple[float, float, float], dtype: torch.dtype
) -> None:
    size = max(len(target), len(draft))
    target_row = probs_of(target + [0.0] * (size - len(target)), dtype)
    draft_row = probs_of(draft + [0.0] * (size - len(draft)), dtype)
    guess = sample(draft_row, draws[0])
    out = rejection_sample(target_row.repeat(2, 1), draft_row[None], [guess], [draws[1]], [draws[2]] * 2)
    assert all(target_row[token] > 0 for token in out.token_ids)
    assert len(out.token_ids) == out.num_accepted + 1


def test_residual_emptied_by_rounding_falls_back_on_the_target() -> None:
    """Rows that differ by their last bit leave nothing above the draft, and yet the largest draw rejects."""
    target = torch.tensor([[0.5, 0.25, 0.0], [1.0, 0.0, 0.0]])
    draft = torch.nextafter(target[:1], torch.tensor(1.0))
    assert rejection_sample(target, draft, [0], [ALMOST_ONE], [0.9, 0.5]) == VerifyOutput(0, (1,))
    assert rejection_sample(target, draft, [0], [1 - 2.0**-20], [0.9, 0.5]).num_accepted == 1


def test_residual_is_the_targets_excess() -> None:
    target, draft = np.array([0.5, 0.5, 0.0], np.float32), np.array([0.25, 0.125, 0.625], np.float32)
    assert rejection.residual(target, draft).tolist() == [0.25, 0.375, 0.0]
    assert rejection.residual(target, draft).dtype == np.float64


def test_draft_token_outside_its_own_distribution_is_our_fault() -> None:
    target = torch.tensor([[0.5, 0.5]] * 2)
    with pytest.raises(AssertionError, match="its own draft_probs exclude"):
        rejection_sample(target, torch.tensor([[1.0, 0.0]]), [1], [0.5], [0.5] * 2)


def test_rows_that_do_not_match_the_drafts_are_our_fault() -> None:
    rows = torch.full((3, 2), 0.5)
    with pytest.raises(AssertionError, match="one target row"):
        rejection_sample(rows, rows[:1], [0], [0.5], [0.5] * 2)
    with pytest.raises(AssertionError, match="one draft row"):
        rejection_sample(rows, rows[:1], [0, 1], [0.5] * 2, [0.5] * 3)
    with pytest.raises(AssertionError, match="one row of noise"):
        coupled_sample(rows, [0], torch.zeros(2, 2))


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0]])
def test_sample_refuses_what_is_no_distribution(row: list[float]) -> None:
    with pytest.raises(AssertionError, match="finite and not all zero"):
        sample(torch.tensor(row), 0.5)


def test_arguments_stay_as_they_were() -> None:
    target, draft = torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    before = target.clone(), draft.clone()
    rejection_sample(target, draft, [0], [0.9], [0.5, 0.5])
    coupled_sample(target, [0], torch.zeros(2, 2))
    assert torch.equal(target, before[0])
    assert torch.equal(draft, before[1])


def test_coupled_stops_at_the_first_surprise() -> None:
    target = torch.full((3, 3), 1 / 3)
    noise = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    assert coupled_sample(target, [0, 1], noise) == VerifyOutput(2, (0, 1, 2))
    assert coupled_sample(target, [0, 2], noise) == VerifyOutput(1, (0, 1))
    assert coupled_sample(target, [1, 1], noise) == VerifyOutput(0, (0,))
    assert coupled_sample(target[:1], [], noise[:1]) == VerifyOutput(0, (0,))


def test_gumbel_noise_never_saves_an_excluded_token() -> None:
    assert one_request.sample_gumbel(torch.tensor([0.0, 1e-38]), torch.tensor([40.0, -4.0], dtype=torch.float64)) == 1


def test_one_hot_probs() -> None:
    assert one_hot_probs([2, 0], 3).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert one_hot_probs([], 3).shape == (0, 3)
    assert one_hot_probs([1], 3, torch.float64).dtype == torch.float64
