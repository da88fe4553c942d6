"""A tiny pair, built once a module, and what it is built from."""

from pathlib import Path

import pytest
import yaml

from magicdec import LLM
from tests.commands.commands import CONFIG
from tests.support.engines import tiny_pair
from tests.support.tiny_models import write_tiny_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("cli"), "self")


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "hf")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""
