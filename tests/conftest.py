"""Settings for all tests: hypothesis draws the same examples in every run, and keeps no clock; threads sleep early.

Several workers (pytest-xdist, as `make pytest` runs it) share the cores between them, and each of them takes whole
files: what a module builds is built once. Folders whose tests share a server or a browser stay together as well.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from magicdec.threads import wait_politely

# Both before any test module imports torch, and for the processes that tests start.
wait_politely()
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))

import torch  # noqa: E402

from tests.standin.fixture import standin  # noqa: E402  a fixture

__all__ = ["standin"]
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=False)
settings.load_profile("fixed")

ALL_THREADS = torch.get_num_threads()
TOGETHER = ("tests/runtime/openai/page/", "tests/runtime/triton_backend/")
# What takes longest, so that it starts first and no worker is left with it at the end.
FIRST = (
    "tests/e2e/test_demo.py",
    "tests/e2e/test_smollm2.py",
    "tests/e2e/test_trtllm.py",
    "tests/runtime/triton_backend/",
    "tests/runtime/engine/test_engine_toy.py",
    "tests/runtime/engine/test_law.py",
    "tests/plugins/test_acceptance_kernel.py",
)


def unit(nodeid: str) -> str:
    """What one worker runs as a whole: a file, or a folder."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # not by the number of tests, but as they are collected
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        ranks = {name: rank for rank, name in enumerate(FIRST)}
        items.sort(key=lambda item: ranks.get(unit(item.nodeid), len(ranks)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and much faster beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def all_threads(one_thread: None) -> Iterator[None]:  # noqa: ARG001 - comes after it
    """Unlike the tiny models, the real one is worth all threads that there are for this worker."""
    torch.set_num_threads(ALL_THREADS)
    yield
    torch.set_num_threads(1)
