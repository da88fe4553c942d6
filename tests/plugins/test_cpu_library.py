"""The native library is found and right, or its absence is said; its threads survive a fork."""

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.plugins.cpu import library
from magicdec.plugins.cpu.library import best_isa, native, set_isa


@pytest.fixture(autouse=True)
def load_anew() -> Iterator[None]:
    native.cache_clear()
    yield
    native.cache_clear()


def test_it_was_built_and_reads_memory() -> None:
    lib = native()
    assert lib is not None
    data = torch.arange(100_000)
    expected = 0
    for word in data[: len(data) // 512 * 512].tolist():
        expected ^= word
    assert lib.magicdec_read_bytes(data.data_ptr(), len(data) // 512 * 512 * 8) == expected


@pytest.mark.parametrize(
    ("reason", "message"),
    [("missing", "cannot be loaded .it was not built.: computing with PyTorch"), ("off", "MAGICDEC_NATIVE=0")],
)
def test_its_absence_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str, message: str, tmp_path: Path
) -> None:
    if reason == "off":
        monkeypatch.setenv("MAGICDEC_NATIVE", "0")
    else:
        monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with caplog.at_level(logging.WARNING):
        assert native() is None
        assert native() is None
    assert len(caplog.records) == 1
    assert re.search(message, caplog.records[0].getMessage())


class Digest:
    restype = None

    def __call__(self) -> bytes:
        return b"0" * 64


@pytest.mark.parametrize("old", [SimpleNamespace(magicdec_sources=Digest()), SimpleNamespace()], ids=["other", "older"])
def test_a_library_of_other_sources_is_refused(old: SimpleNamespace) -> None:
    with pytest.raises(EngineError, match=r"built from other sources .* make install"):
        library._check_sources(cast(ctypes.CDLL, old))


def test_an_unknown_instruction_set_is_refused() -> None:
    lib = native()
    assert lib is not None
    with pytest.raises(EngineError, match="'neon' is not to be had here; the CPU's best is"):
        set_isa(lib, "neon")
    best = best_isa(lib)
    set_isa(lib, "portable")
    assert best_isa(lib) == "portable"
    set_isa(lib, best)


def test_threads_come_and_go_and_a_forked_child_has_its_own() -> None:
    lib = native()
    assert lib is not None
    data = torch.arange(65536)
    wanted = lib.magicdec_read_bytes(data.data_ptr(), data.nbytes)
    for count in (3, 1, 2):
        lib.magicdec_set_num_threads(count)
        assert lib.magicdec_read_bytes(data.data_ptr(), data.nbytes) == wanted
    child = os.fork()
    if child == 0:
        os._exit(0 if lib.magicdec_read_bytes(data.data_ptr(), data.nbytes) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
    lib.magicdec_set_num_threads(torch.get_num_threads())
