"""Stand-in for `tensorrt_llm` 1.2: see `tests/standin/__init__.py`."""

__version__ = "1.2.1"

from . import plugin
from .builder import BuildConfig, build
from .mapping import Mapping

__all__ = ["BuildConfig", "Mapping", "build", "plugin"]
