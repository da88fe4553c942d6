"""Settings for all tests: hypothesis draws the same examples in every run, and keeps no clock; threads sleep early."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from magicdec.threads import wait_politely

wait_politely()  # before any test module imports torch

import torch  # noqa: E402

from tests.standin.fixture import standin  # noqa: E402  a fixture

__all__ = ["standin"]
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("fixed")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and much faster beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
