"""`serving.metrics` under its name before 0.2, for servers that import it from here."""

from magicdec.runtime.serving.metrics import EngineMetrics, HasEngine

__all__ = ["EngineMetrics", "HasEngine"]
