"""`serving.metrics_mirror` under its former name, for servers that import it from here."""

from magicdec.runtime.serving.metrics_mirror import MetricsMirror

__all__ = ["MetricsMirror"]
