"""Engines that many tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import Drafter, tiny_pair

PairFactory = Callable[[Drafter], Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and much faster beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Builds a tiny pair for a drafter, once a session."""
    directory = tmp_path_factory.mktemp("pairs")
    return lambda drafter: tiny_pair(directory, drafter)
