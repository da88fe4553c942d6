"""One tiny pair and its LLM for all tests of the server."""

from collections.abc import Iterator

import pytest

from magicdec.runtime.llm import LLM
from tests.runtime.openai.serving import Served, serving, wide_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The engine directory."""
    return str(wide_pair(tmp_path_factory.mktemp("openai")))


@pytest.fixture(scope="session")
def llm(pair: str) -> LLM:
    """The offline interface; tests that serve it own its engine meanwhile."""
    return LLM(pair)


@pytest.fixture
def served(llm: LLM) -> Iterator[Served]:
    """A server of its own for each test, so that none depends on another."""
    with serving(llm) as running:
        yield running


@pytest.fixture(scope="module")
def shared(llm: LLM) -> Iterator[Served]:
    """One server for many small requests."""
    with serving(llm) as running:
        yield running
