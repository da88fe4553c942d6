"""The native CPU library: found, loaded once, and told how many threads to use.

It is compiled when the package is installed. Where no compiler was at hand there is none; whoever would use it then
takes the PyTorch path, and one log line says so.
"""

import ctypes
import functools
import hashlib
import logging
import os
from pathlib import Path

import torch

from magicdec.errors import EngineError

ISAS = ("avx512", "avx2", "portable")
logger = logging.getLogger(__name__)


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library, with as many threads as PyTorch has; None if it was not built or is switched off.

    EngineError if it is older than its sources, which stand beside it where the package was installed to be edited.

    MAGICDEC_NATIVE=0 switches it off, MAGICDEC_ISA chooses an instruction set below the CPU's best.
    """
    if os.environ.get("MAGICDEC_NATIVE") == "0":
        logger.warning("MAGICDEC_NATIVE=0: computing with PyTorch's kernels, which are several times slower")
        return None
    try:
        library = ctypes.CDLL(str(_path()))
    except OSError as error:
        logger.warning(
            "the native CPU library cannot be loaded (%s): computing with PyTorch's kernels, several times slower. "
            "Install a C++20 compiler (Debian and Ubuntu: apt install g++) and install magicdec again",
            error,
        )
        return None
    _check_sources(library)
    _declare(library)
    if isa := os.environ.get("MAGICDEC_ISA"):
        set_isa(library, isa)
    library.magicdec_set_num_threads(torch.get_num_threads())
    return library


def use_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which is not yet written to, in large pages where it is on a CPU that has them to give."""
    library = native() if tensor.device.type == "cpu" else None
    if library is not None:
        library.magicdec_use_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def set_isa(library: ctypes.CDLL, isa: str) -> None:
    """Compute with this instruction set; EngineError if the CPU does not have it."""
    if isa not in ISAS or library.magicdec_set_isa(isa.encode()):
        raise EngineError(f"instruction set {isa!r} is not to be had here; the CPU's best is {best_isa(library)}")


def best_isa(library: ctypes.CDLL) -> str:
    """The instruction set in use."""
    name: bytes = library.magicdec_isa()
    return name.decode()


def _path() -> Path:
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise OSError("it was not built")
    return found[0]


def _check_sources(library: ctypes.CDLL) -> None:
    sources = Path(__file__).parent / "csrc"
    if not sources.is_dir():
        return
    files = sorted(sources.iterdir(), key=lambda path: path.name)
    if hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() != _sources_of(library):
        raise EngineError(
            f"the native CPU library was built from other sources than those in {sources}; build it again with "
            "make install, or pip install -e ."
        )


def _sources_of(library: ctypes.CDLL) -> str | None:
    """What the library was made from; None if it is so old that it does not say."""
    if not hasattr(library, "magicdec_sources"):
        return None
    library.magicdec_sources.restype = ctypes.c_char_p
    digest: bytes = library.magicdec_sources()
    return digest.decode()


def _declare(library: ctypes.CDLL) -> None:
    """Give the functions their types; each kernel's own module declares the rest."""
    library.magicdec_isa.restype = ctypes.c_char_p
    library.magicdec_set_isa.argtypes = [ctypes.c_char_p]
    library.magicdec_set_num_threads.argtypes = [ctypes.c_int]
    library.magicdec_set_num_threads.restype = None
    library.magicdec_use_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.magicdec_use_huge_pages.restype = None
    library.magicdec_read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.magicdec_read_bytes.restype = ctypes.c_uint64
    library.magicdec_draws.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    library.magicdec_draws.restype = None
