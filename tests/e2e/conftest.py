"""Engines that many tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines import Drafter, tiny_pair

PairFactory = Callable[[Drafter], Path]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Builds a tiny pair for a drafter, once a session."""
    directory = tmp_path_factory.mktemp("pairs")
    return lambda drafter: tiny_pair(directory, drafter)
