"""A rank that fails ends all ranks with its number and the cause, whoever it is; nothing ever hangs."""

import re
import shutil
from pathlib import Path

import pytest

from magicdec.runtime.llm import LLM
from tests.runtime.parallel.launch import HIDDEN, Ended, run_ranks
from tests.runtime.parallel.pairs import build
from tests.runtime.parallel.rank_dies import PARAMS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("engines"), "self", 2)


def ranks_until_one(way: str, *engines: Path, within: tuple[str, ...] = ()) -> Ended:
    return run_ranks(2, "tests.runtime.parallel.rank_dies", way, *engines, within=within, timeout=30)


def process_of(rank: int, ended: Ended) -> str:
    """Its number, as the ranks announced it when they met."""
    found = re.search(rf"rank {rank} is process (\d+) on", ended.stderr)
    assert found, ended
    return found[1]


@pytest.mark.parametrize(("way", "rank"), [("worker raises", 1), ("rank 0 raises in a pass", 0)])
def test_a_rank_that_raises_in_a_pass_says_so_and_ends_all(engine: Path, way: str, rank: int) -> None:
    ended = ranks_until_one(way, engine)
    assert ended.returncode != 0
    message = f"rank {rank} failed while computing a pass: RuntimeError: the memory is full of \N{SNOWMAN}"
    assert message in ended.stderr
    assert "in fail" in ended.stderr, "the traceback is shown"


def test_a_killed_worker_is_named_by_the_launcher(engine: Path) -> None:
    ended = ranks_until_one("worker killed", engine)
    assert ended.returncode != 0
    assert f"PID {process_of(1, ended)} RUNNING" in ended.stdout + ended.stderr
    assert "signal 9" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("worker killed", "rank 0 failed .*: rank 1 .process {1}. is gone while rank 0 was exchanging partial results"),
        ("rank 0 killed", "rank 1 failed .*: rank 0 .process {0}. is gone while rank 1 was waiting for rank 0"),
    ],
)
def test_a_killed_rank_is_noticed_by_the_others_without_a_launcher(engine: Path, way: str, message: str) -> None:
    ended = ranks_until_one(way, engine, within=HIDDEN)
    assert ended.returncode != 0
    assert re.search(message.format(process_of(0, ended), process_of(1, ended)), ended.stderr), ended


def test_what_rank_0_can_catch_does_not_end_the_ranks_and_what_it_does_not_is_shown_once(
    engine: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(engine, tmp_path / "damaged")
    weights = damaged / "target" / "rank1.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    ended = ranks_until_one("script raises", engine, damaged, engine)
    before, error, after = ended.stdout.splitlines()[:3]
    assert error.startswith(f"rank 1 cannot load its share: {weights} cannot be read: ")
    one_rank = LLM(build(tmp_path, "self", 1)).generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids
    assert before == after == str(one_rank)
    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: an error of the script") == 1
    assert "failed while" not in ended.stderr
