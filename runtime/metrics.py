"""`serving.metrics` under its former name, for servers that import it from here."""

from magicdec.runtime.serving.metrics import EngineMetrics, HasEngine

__all__ = ["EngineMetrics", "HasEngine"]
