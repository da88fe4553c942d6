"""Logits of a model split over real ranks, against one rank."""

from pathlib import Path

import torch

from magicdec.runtime.runners.opening import open_runner
from tests.runtime.parallel.launch import run_ok
from tests.runtime.parallel.pairs import FAMILIES, VOCAB_SIZE, build, float64_spec, passes
from tests.runtime.parallel.rank_logits import FAULTS
from tests.support.tiny_models import Family


def test_logits_of_two_ranks_are_those_of_one_and_faults_in_the_exchange_are_seen(tmp_path: Path) -> None:
    engines = [build(tmp_path, "self", 2, family=family) for family in FAMILIES]
    run_ok(2, "tests.runtime.parallel.rank_logits", tmp_path / "logits", "--faults", *engines)
    logits = torch.load(tmp_path / "logits")
    assert len(logits) == len(FAMILIES) + len(FAULTS)
    for family, mine in zip(FAMILIES, logits, strict=False):
        assert_same(mine, one_rank(tmp_path, family))
    for fault, mine in zip(FAULTS, logits[len(FAMILIES) :], strict=True):
        assert (mine - one_rank(tmp_path, FAMILIES[0])).abs().max() > 0.1, fault


def assert_same(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 1
    assert mine.shape == expected.shape == (108, VOCAB_SIZE)
    assert (mine - expected).abs().max() < 1e-12


def one_rank(directory: Path, family: Family) -> torch.Tensor:
    runner = open_runner(float64_spec(build(directory, "self", 1, family=family)))
    return torch.cat([runner.forward(inputs) for inputs in passes()])
