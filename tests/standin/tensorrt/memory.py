"""Raw addresses: which memory was given out as device or host memory, and tensors that look at it."""

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch


class Memory(Protocol):
    """What the runner allocates from: (address, bytes, "device" | "host") of everything given out."""

    allocations: list[tuple[int, int, str]]


class StandinError(RuntimeError):
    """Something that on a GPU would be an error, or silently wrong."""


_MEMORIES: "weakref.WeakSet[Memory]" = weakref.WeakSet()  # what a runner had is forgotten with it


def standin_memory(memory: Memory) -> None:
    """Tell the stand-in about a memory; all that were told are searched, at the time of each execution."""
    _MEMORIES.add(memory)


def forget_memories() -> None:
    """Start anew."""
    _MEMORIES.clear()


def look(address: int, shape: Sequence[int], dtype: torch.dtype, place: str, what: str) -> torch.Tensor:
    """A tensor over raw memory, after checking that all of it lies in one allocation of that place."""
    size = math.prod(shape) * dtype.itemsize
    _check_place(address, max(size, 1), place, what)
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(tuple(shape))


def _check_place(address: int, size: int, place: str, what: str) -> None:
    elsewhere = None
    for memory in _MEMORIES:
        for start, length, where in memory.allocations:
            if start <= address and address + size <= start + length:
                if where == place:
                    return
                elsewhere = where
    if elsewhere is None:
        raise StandinError(f"{what}: {size} bytes at {address:#x} lie in no allocation, or reach over its end")
    raise StandinError(f"{what}: is in {elsewhere} memory and must be in {place} memory")
