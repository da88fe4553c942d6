"""Tiny models run on one thread: on small machines, threads that wait for each other cost more than they save."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""
