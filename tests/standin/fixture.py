"""The pytest fixture of the stand-ins."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from magicdec.builder.trtllm import rules as trtllm_rules
from tests.standin import standin_packages


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in `tensorrt` module; `tensorrt_llm` can be imported too, and pairs can be built for float32."""
    monkeypatch.setattr(trtllm_rules, "FMHA_DTYPES", {*trtllm_rules.FMHA_DTYPES, "float32"})
    with standin_packages():
        module = import_module("tensorrt")
        yield module
        module.forget_memories()
