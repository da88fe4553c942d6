"""Publishes a Prometheus registry through another system's metrics, e.g. those of Triton's Python backend."""

from collections.abc import Callable
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

Kind = Literal["counter", "gauge"]


class MirrorMetric(Protocol):
    """One series over there."""

    def set(self, value: float) -> None:
        """Set a gauge."""
        ...

    def increment(self, value: float) -> None:
        """Add to a counter; value >= 0."""
        ...


class MirrorFamily(Protocol):
    """All series of one name over there; an instance of pb_utils.MetricFamily is one."""

    def Metric(self, *, labels: dict[str, str]) -> MirrorMetric:
        """A new series."""
        ...


class MetricsMirror:
    """Copies every series of a registry whenever `publish` is called; not thread-safe.

    new_family: makes a family of a name, a description and a kind.

    A histogram becomes counters, NAME_bucket, NAME_sum and NAME_count: its text, but for the TYPE lines, is the same.
    """

    def __init__(self, registry: CollectorRegistry, new_family: Callable[[str, str, Kind], MirrorFamily]) -> None:
        self._registry = registry
        self._new_family = new_family
        self._families: dict[str, MirrorFamily] = {}
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], MirrorMetric] = {}
        self._published: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def publish(self) -> None:
        """Bring the copies up to date; only what has changed is sent."""
        for family in self._registry.collect():
            kind: Kind = "gauge" if family.type == "gauge" else "counter"
            for sample in family.samples:
                if not sample.name.endswith("_created"):  # when a series began: of use to OpenMetrics alone
                    self._copy(sample, kind, family.documentation)

    def close(self) -> None:
        """Drop every series, and then the families, in the order that Triton's Python backend wants."""
        self._series.clear()
        self._families.clear()

    def _copy(self, sample: Sample, kind: Kind, description: str) -> None:
        key = (sample.name, tuple(sample.labels.items()))
        metric = self._series.get(key)
        if metric is None:
            if sample.name not in self._families:
                self._families[sample.name] = self._new_family(sample.name, description, kind)
            metric = self._series[key] = self._families[sample.name].Metric(labels=dict(sample.labels))
            self._published[key] = 0.0
        change = sample.value - self._published[key]
        if change == 0:
            return
        if kind == "gauge":
            metric.set(sample.value)
        else:
            metric.increment(change)
        self._published[key] = sample.value
