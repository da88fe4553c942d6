"""MagicDec: speculative decoding for long contexts with a bounded draft cache and exact acceptance.

The public names below are imported on first use, so that `import magicdec` costs no PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magicdec.errors import MagicDecError
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams
    from magicdec.runtime.serving.async_llm import AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "MagicDecError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "AsyncLLM": "magicdec.runtime.serving.async_llm",
    "LLM": "magicdec.runtime.llm",
    "CompletionOutput": "magicdec.runtime.outputs",
    "MagicDecError": "magicdec.errors",
    "RequestMetrics": "magicdec.runtime.outputs",
    "RequestOutput": "magicdec.runtime.outputs",
    "SamplingParams": "magicdec.runtime.sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
