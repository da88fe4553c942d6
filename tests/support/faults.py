"""Planting faults in the real source: a test that passes with the fault in place proves nothing."""

import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MOVED = "the source has changed: plant the fault anew"


def plant(
    patch: pytest.MonkeyPatch, owner: type | ModuleType, function: str, old: str, new: str, *others: ModuleType
) -> None:
    """In `function` of `owner`, `old` becomes `new`. others: modules that imported the function by its name."""
    real: Any = inspect.unwrap(getattr(owner, function))
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1, MOVED
    scope = dict(real.__globals__)
    exec(compile(source.replace(old, new), f"<{function}>", "exec"), scope)
    for each in (owner, *others):
        if hasattr(each, function):
            patch.setattr(each, function, scope[function])


def faulty_copy(patch: pytest.MonkeyPatch, module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of the whole module in which `old` has become `new`; the real one stays as it is."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, MOVED
    copy = ModuleType(f"faulty_{module.__name__.rpartition('.')[2]}")
    patch.setitem(sys.modules, copy.__name__, copy)  # dataclasses look their module up
    exec(compile(source.replace(old, new), copy.__name__, "exec"), copy.__dict__)
    return copy
