"""A pair for two tensor-parallel ranks: the stub of `tensorrt_llm` is rank 0, a worker beside the server is rank 1."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.triton_backend.parameters import LLMParameters
from magicdec.runtime.triton_backend.repository import write_repository
from tests.runtime.parallel.launch import MPIEXEC
from tests.runtime.triton_backend.cases import case, expected_text
from tests.runtime.triton_backend.client import call, text
from tests.runtime.triton_backend.conftest import DTYPE, VOCAB_SIZE
from tests.runtime.triton_backend.server import STOP_SECONDS, TritonServer, kill, start
from tests.runtime.triton_backend.test_streams import wait_until_idle
from tests.support.engines import tiny_pair

WORKER = "from magicdec.runtime.parallel import join_ranks; join_ranks()"


@pytest.mark.slow
def test_two_ranks_answer_as_one(tmp_path: Path) -> None:
    pair = tiny_pair(tmp_path, "in_cache", tp_size=2, vocab_size=VOCAB_SIZE)
    single = tiny_pair(tmp_path, "in_cache", vocab_size=VOCAB_SIZE)
    offline = LLM(single, dtype=DTYPE, num_draft_tokens=0)
    write_repository(tmp_path / "models", LLMParameters(pair, dtype=DTYPE))
    server = start(
        tmp_path / "models",
        tmp_path,
        within=[str(MPIEXEC), "-n", "1"],
        after=[":", "-n", "1", sys.executable, "-c", WORKER],
    )
    try:
        for index in range(6):
            each = case(index, max_tokens=30)
            for model in ("ensemble", "tensorrt_llm_bls"):
                assert text(call(server, model, each.text_inputs())) == expected_text(each.expected(offline))
        wait_until_idle(server)
        os.kill(triton_pid(server), signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 0, server.log.read_text()[-3000:]
    finally:
        server.process.terminate()  # the launcher then kills its ranks, which are in sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(5)
        kill(server.process)


def triton_pid(server: TritonServer) -> int:
    """Of the server itself, which mpiexec started by way of a process of its own."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            pid, name, rest = re.match(r"(\d+) \((.*)\) . (\d+)", file.read_text()).groups()  # type: ignore[union-attr]
            parents[int(pid)] = (name, int(rest))
    for pid, (name, parent) in parents.items():
        while name == "tritonserver" and parent in parents:
            if parent == server.process.pid:
                return pid
            parent = parents[parent][1]
    raise AssertionError(f"no server runs:\n{server.log.read_text()[-3000:]}")
