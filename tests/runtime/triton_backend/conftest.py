"""One server and one offline engine for all tests: the same tiny pair, in float64, where no batch changes a token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.triton_backend.parameters import LLMParameters
from magicdec.runtime.triton_backend.repository import write_repository
from tests.runtime.triton_backend.server import TritonServer, serving
from tests.support.engines import tiny_pair

VOCAB_SIZE = 300  # covers every byte
DTYPE = "float64"
MAX_QUEUE_SIZE = 40


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="session")
def engine(work: Path) -> Path:
    return tiny_pair(work / "pair", "in_cache", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def server(work: Path, engine: Path) -> Iterator[TritonServer]:
    write_repository(work / "models", LLMParameters(engine, dtype=DTYPE, max_queue_size=MAX_QUEUE_SIZE))
    with serving(work / "models", work) as running:
        yield running


@pytest.fixture(scope="session")
def offline(engine: Path) -> LLM:
    """Plain decoding."""
    return LLM(engine, dtype=DTYPE, num_draft_tokens=0)
