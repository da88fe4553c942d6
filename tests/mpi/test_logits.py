"""Logits of a model split over real ranks, against one rank."""

from pathlib import Path

import pytest
import torch

from magicdec.runtime.runner_spec import open_runner
from tests.mpi.launch import run_ok
from tests.mpi.pairs import FAMILIES, VOCAB_SIZE, build, float64_spec, passes
from tests.mpi.rank_logits import FAULTS


def one_rank(directory: Path, **options: str) -> torch.Tensor:
    runner = open_runner(float64_spec(build(directory, "self", 1, **options)))  # type: ignore[arg-type]
    return torch.cat([runner.forward(inputs) for inputs in passes()])


@pytest.mark.parametrize("tp_size", [2, 4])  # with 4 ranks, two share each of the 2 KV heads
def test_logits_are_those_of_one_rank(tmp_path: Path, tp_size: int) -> None:
    families = FAMILIES if tp_size == 2 else FAMILIES[:2]
    engines = [build(tmp_path, "self", tp_size, family=family) for family in families]
    run_ok(tp_size, "tests.mpi.rank_logits", tmp_path / "logits", *engines)
    for family, logits in zip(families, torch.load(tmp_path / "logits"), strict=True):
        expected = one_rank(tmp_path, family=family)
        assert expected.std() > 1
        assert logits.shape == (108, VOCAB_SIZE)
        assert (logits - expected).abs().max() < 1e-12, family


def test_faulty_communication_is_seen(tmp_path: Path) -> None:
    run_ok(2, "tests.mpi.rank_logits", tmp_path / "logits", "--faults", build(tmp_path, "self", 2))
    expected = one_rank(tmp_path)
    sound, *faulty = torch.load(tmp_path / "logits")
    assert (sound - expected).abs().max() < 1e-12
    for fault, logits in zip(FAULTS[1:], faulty, strict=True):
        assert (logits - expected).abs().max() > 0.1, fault
