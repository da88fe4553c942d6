"""Starting with mpiexec: the command line on several ranks, and as many ranks as the engine was built for."""

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from magicdec.errors import EngineError
from magicdec.runtime.llm import LLM
from magicdec.runtime.parallel.mpi import Peer, check_num_ranks, num_launched
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.parallel.launch import MPIEXEC, run, run_ranks
from tests.runtime.parallel.pairs import build

PROMPT = "the rain in the"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def options(engine: Path) -> list[str]:
    return ["generate", "--engine", str(engine), "--prompt-file", "-", "--temperature", "0", "--max-tokens", "12"]


def test_generate_reads_and_prints_on_rank_0_alone(directory: Path) -> None:
    ended = run_ranks(2, "magicdec", *options(build(directory, "self", 2)), "--ignore-eos", "--json", stdin=PROMPT)
    assert ended.returncode == 0, ended
    answer = json.loads(ended.stdout)  # one object: no other rank has printed one
    llm = LLM(build(directory, "self", 1))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert answer["outputs"][0]["token_ids"] == llm.generate([PROMPT], params)[0].outputs[0].token_ids
    assert ended.stderr.count("prompt tokens in") == 1


def test_an_engine_for_one_rank_is_refused_on_two(directory: Path) -> None:
    command = ["-m", "magicdec", *options(build(directory, "self", 1))]
    ended = run_ranks(2, "magicdec", *command[2:], stdin=PROMPT)
    assert ended.returncode == 2, ended
    assert "was built for 1 tensor-parallel rank, and 2 run; start it with: " in ended.stderr
    assert f"start it with: {shlex.join([sys.executable, *command])}" in ended.stderr


def test_no_launcher_at_all(directory: Path) -> None:
    command = [sys.executable, "-m", "magicdec", *options(build(directory, "self", 2))]
    ended = run(command, stdin=PROMPT)
    assert ended.returncode == 2, ended
    assert f"and 1 runs; start it with: mpiexec -n 2 {shlex.join(command)}" in ended.stderr


def test_a_bad_option_ends_all_ranks_with_one_message(directory: Path) -> None:
    ended = run_ranks(2, "magicdec", "generate", "--engine", str(directory), "--prompt", "a", "--prompt-file", "b")
    assert ended.returncode == 2, ended
    assert ended.stderr.count("both --prompt and --prompt-file are given") == 1


def test_a_rank_does_not_wait_for_ever_for_one_that_left_before_it_joined() -> None:
    script = "import os; from magicdec.runtime.parallel import mpi; os.environ['PMI_RANK'] == '0' or mpi.connect(2)"
    ended = run([str(MPIEXEC), "-n", "2", sys.executable, "-c", script], timeout=20)
    assert ended.returncode == 1, ended
    assert "Timeout (0:00:02)!" in ended.stderr
    assert "in connect" in ended.stderr


def test_as_many_ranks_as_were_built_for() -> None:
    check_num_ranks(2, 2, "engine")
    with pytest.raises(EngineError, match=r"engine was built for 2 tensor-parallel ranks, and 3 run; .*mpiexec -n 2 "):
        check_num_ranks(2, 3, "engine")


def test_launchers_tell_how_many_they_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_launched() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert num_launched() == 3
    monkeypatch.setenv("PMI_SIZE", "4")
    assert num_launched() == 4


def test_a_process_lives_until_it_is_gone_and_is_not_taken_for_a_later_one() -> None:
    started = started_of(os.getpid())
    me = Peer(0, os.uname().nodename, os.getpid(), started)
    assert me.lives()
    assert not replace(me, started=started + 1).lives()
    assert not replace(me, pid=2**22 + 1).lives()  # beyond the highest number
    assert replace(me, pid=2**22 + 1, host="elsewhere").lives(), "nothing is known of it"
    child = os.posix_spawn("/bin/true", ["true"], {})
    while replace(me, pid=child, started=started_of(child)).lives():
        pass
    os.waitpid(child, 0)


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
