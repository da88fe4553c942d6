"""Draws are a function of (seed, position, purpose); Philox is checked against its definition, written anew here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from magicdec.plugins.cpu import library
from magicdec.runtime.sampling import draws
from magicdec.runtime.sampling.draws import Purpose, child_seed, fresh_seed, uniform
from tests.support.one_request import gumbel

WORD = 2**64 - 1
SEEDS = st.integers(0, WORD)
POSITIONS = st.integers(0, 2**40)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011 in whole numbers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & WORD, (k[1] + 0xBB67AE8584CAA73B) & WORD]
    return c


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS, purpose=st.sampled_from(Purpose))
def test_uniform_is_the_first_word_of_its_philox_block(seed: int, position: int, purpose: Purpose) -> None:
    word = philox((1, position, int(purpose), 0), (seed, 0))[0]  # numpy steps the counter before the first block
    assert uniform(seed, position, purpose) == (word >> 11) / 2**53


@pytest.fixture(params=["native", "numpy"])
def bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes many draws at once."""
    if request.param == "numpy":
        monkeypatch.setattr(draws, "native", lambda: None)
    elif library.native() is None:
        pytest.skip("the native library was not built")


TOGETHER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PAIRS = st.lists(st.tuples(SEEDS, POSITIONS), max_size=20)


def _arrays(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    table = np.array(pairs, dtype=np.uint64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


@pytest.mark.usefixtures("bits")
@TOGETHER
@given(pairs=PAIRS, purpose=st.sampled_from(Purpose))
def test_draws_made_together_are_those_made_alone(pairs: list[tuple[int, int]], purpose: Purpose) -> None:
    expected = [uniform(*pair, purpose) for pair in pairs]
    assert draws.uniforms(*_arrays(pairs), purpose).tolist() == expected


@pytest.mark.usefixtures("bits")
@TOGETHER
@given(
    pairs=PAIRS.filter(bool), size=st.sampled_from([1, 3, 4, 50, draws._NOISE_AT_ONCE // 2, draws._NOISE_AT_ONCE + 1])
)
def test_gumbel_noise_made_together_is_that_made_alone(pairs: list[tuple[int, int]], size: int) -> None:
    """To the last bit, also where a batch is made in several parts."""
    pairs = pairs if size < 100 else pairs[:3]
    assert torch.equal(draws.gumbels(*_arrays(pairs), size), torch.stack([gumbel(*pair, size) for pair in pairs]))


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS)
def test_gumbel_is_made_of_the_words_in_order(seed: int, position: int) -> None:
    words = [w for block in (1, 2) for w in philox((block, position, int(Purpose.GUMBEL), 0), (seed, 0))]
    expected = [-math.log(-math.log(((w >> 12) + 0.5) / 2**52)) for w in words[:6]]
    assert gumbel(seed, position, 6).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS, size=st.integers(1, 50), more=st.integers(0, 50))
def test_gumbel_of_a_larger_vocabulary_begins_alike(seed: int, position: int, size: int, more: int) -> None:
    assert torch.equal(gumbel(seed, position, size), gumbel(seed, position, size + more)[:size])


@pytest.mark.parametrize("bits", [0, WORD])
def test_extreme_bits_give_no_infinity_and_no_one(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    def raw(_seed: int, _position: int, _purpose: Purpose, count: int) -> NDArray[np.uint64]:
        return np.full(count, bits, dtype=np.uint64)

    monkeypatch.setattr(draws, "_words_of_one", raw)
    assert 0 <= uniform(0, 0, Purpose.ACCEPT) < 1
    assert bool(gumbel(0, 0, 4).isfinite().all())


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    first = uniform(7, 3, Purpose.SAMPLE), gumbel(7, 3, 9)
    for position in range(20):
        uniform(7, position, Purpose.DRAFT)
        gumbel(7, position, 5)
    assert uniform(7, 3, Purpose.SAMPLE) == first[0]
    assert torch.equal(gumbel(7, 3, 9), first[1])


def test_uniform_is_uniform() -> None:
    values = np.array([uniform(1, position, Purpose.ACCEPT) for position in range(4000)])
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_gumbel_has_its_law() -> None:
    assert stats.kstest(gumbel(1, 0, 40_000).numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("step", ["seed", "position", "purpose", "both"])
def test_neighbours_are_independent(step: str) -> None:
    """Correlation of 4000 draws with the draw one step away in one part of the key: 4.5 standard deviations."""
    here, there = [], []
    for i in range(4000):
        here.append(uniform(i, 5, Purpose.DRAFT) if step == "seed" else uniform(9, i, Purpose.DRAFT))
        there.append(
            {
                "seed": uniform(i + 1, 5, Purpose.DRAFT),
                "position": uniform(9, i + 1, Purpose.DRAFT),
                "purpose": uniform(9, i, Purpose.ACCEPT),
                "both": uniform(10, i - 1 if i else 0, Purpose.DRAFT),
            }[step]
        )
    assert abs(np.corrcoef(here, there)[0, 1]) < 4.5 / math.sqrt(4000)


def test_rows_of_noise_are_independent() -> None:
    rows = torch.stack([gumbel(seed, position, 4000) for seed in (1, 2) for position in range(5)])
    correlation = torch.corrcoef(rows) - torch.eye(10, dtype=torch.float64)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(4000)


def test_keys_never_meet() -> None:
    keys = [(seed, position, purpose) for seed in range(8) for position in range(32) for purpose in Purpose]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_child_seeds() -> None:
    assert child_seed(5, 0) == 5
    children = {child_seed(seed, index) for seed in range(50) for index in range(20)}
    assert len(children) == 1000
    assert all(0 <= seed <= WORD for seed in children)
    assert child_seed(5, 1) == child_seed(5, 1) != child_seed(6, 0)


def test_fresh_seeds_differ() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed <= WORD for seed in seeds)
