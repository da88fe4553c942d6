"""Tensor-parallel ranks over MPI; rank 0 decides.

`join_ranks` is at hand here as well, for scripts that only serve as a rank; looking it up imports PyTorch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magicdec.runtime.parallel.leader import join_ranks

__all__ = ["join_ranks"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from magicdec.runtime.parallel import leader

    return getattr(leader, name)
