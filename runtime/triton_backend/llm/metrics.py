"""What the engine does, under the TensorRT-LLM backend's names of metrics and under MagicDec's own."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
from prometheus_client import CollectorRegistry

from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.serving.metrics import EngineMetrics, HasEngine
from magicdec.runtime.serving.metrics_mirror import MetricsMirror

Kind = Literal["counter", "gauge", "histogram"]
_BUCKETS: Final = (10.0, 50.0, 100.0, 500.0, 1000.0)  # the TensorRT-LLM backend's
_PAGE_BYTES: Final = 4096
# Family -> the label that tells its gauges apart, and what it is.
_GAUGES: Final = {
    "nv_trt_llm_request_metrics": ("request_type", "Requests by state"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "Bytes of memory in use"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "Blocks of the target's KV cache"),
    "nv_trt_llm_inflight_batcher_metrics": ("inflight_batcher_specific_metric", "Requests in the batch"),
    "nv_trt_llm_general_metrics": ("general_type", "Seconds since 1970 and steps of the engine"),
}
_HISTOGRAMS: Final = {
    "total_input_tokens": ("nv_llm_input_token_len", "Prompt tokens of a request"),
    "total_output_tokens": ("nv_llm_output_token_len", "Output tokens of a request"),
}


class Metric(Protocol):
    """One series of Triton's."""

    def set(self, value: float) -> None:
        """Set a gauge."""
        ...

    def increment(self, value: float) -> None:
        """Add to a counter."""
        ...

    def observe(self, value: float) -> None:
        """Add to a histogram."""
        ...


class Family(Protocol):
    """All series of one name; an instance of pb_utils.MetricFamily is one."""

    def Metric(self, *, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        """A new series."""
        ...


NewFamily = Callable[[str, str, Kind], Family]


class TRTLLMMetrics(EngineMetrics):
    """Counts what the engine's thread tells, and publishes it from another one.

    labels: of every series, e.g. the model's name.
    """

    def __init__(self, llm: HasEngine, new_family: NewFamily, labels: dict[str, str]) -> None:
        self._registry = CollectorRegistry()
        super().__init__(self._registry, llm)
        self._mirror = MetricsMirror(self._registry, new_family)
        self._engine = llm.engine
        self._num_steps = 0
        self._ended: deque[RequestOutput] = deque()
        self._gauges = {
            name: (new_family(name, text, "gauge"), label, labels) for name, (label, text) in _GAUGES.items()
        }
        self._series: dict[tuple[str, str], Metric] = {}
        self._published: dict[tuple[str, str], float] = {}
        self._families = {kind: new_family(name, text, "histogram") for kind, (name, text) in _HISTOGRAMS.items()}
        self._histograms = {
            kind: family.Metric(labels={"response_metric_type": kind} | labels, buckets=list(_BUCKETS))
            for kind, family in self._families.items()
        }
        self._requests = dict.fromkeys(("active", "scheduled", "context", "waiting", "generation", "paused"), 0)

    def stepped(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """The engine made a step of so many seconds, which gave these outputs."""
        super().stepped(outputs, seconds)
        self._num_steps += 1
        self._ended.extend(output for output in outputs if output.finished)
        self._look()

    def finished(self, output: RequestOutput) -> None:
        """A request ended between steps, e.g. by an abort."""
        super().finished(output)
        self._ended.append(output)
        self._look()

    def publish(self) -> None:
        """Bring Triton's series up to date; one thread calls this now and then."""
        self._mirror.publish()
        while self._ended:
            output = self._ended.popleft()
            self._histograms["total_input_tokens"].observe(output.metrics.num_prompt_tokens)
            self._histograms["total_output_tokens"].observe(output.metrics.num_output_tokens)
        for family, kind, value in self._values():
            self._set(family, kind, value)

    def close(self) -> None:
        """Drop every series, and then the families: Triton crashes over those that outlive the model."""
        self._mirror.close()
        self._series.clear()
        self._histograms.clear()
        self._gauges.clear()
        self._families.clear()

    def _look(self) -> None:
        """In the engine's thread, which alone may look at requests."""
        running, waiting = self._engine.scheduler.running, self._engine.scheduler.waiting
        context = sum(request.num_output_tokens == 0 for request in running)
        self._requests = {
            "active": len(running) + len(waiting),
            "scheduled": len(running),
            "context": context,
            "waiting": len(waiting),
            "generation": len(running) - context,
            "paused": sum(request.num_preemptions > 0 for request in waiting),
        }

    def _values(self) -> Iterator[tuple[str, str, float]]:
        requests, blocks = self._requests, self._engine.blocks
        used, total = blocks.num_used_blocks, blocks.num_blocks
        for kind in ("active", "scheduled", "context", "waiting"):
            yield "nv_trt_llm_request_metrics", kind, requests[kind]
        yield "nv_trt_llm_request_metrics", "max", self._engine.scheduler.max_batch_size
        yield "nv_trt_llm_inflight_batcher_metrics", "generation_requests", requests["generation"]
        yield "nv_trt_llm_inflight_batcher_metrics", "paused_requests", requests["paused"]
        for kind, value in (("max", total), ("used", used), ("free", total - used), ("tokens_per", blocks.block_size)):
            yield "nv_trt_llm_kv_cache_block_metrics", kind, value
        yield "nv_trt_llm_kv_cache_block_metrics", "fraction", used / total
        yield "nv_trt_llm_runtime_memory_metrics", "cpu", _resident_bytes()
        yield "nv_trt_llm_runtime_memory_metrics", "gpu", torch.cuda.memory_allocated()
        yield "nv_trt_llm_general_metrics", "timestamp", time.time()
        yield "nv_trt_llm_general_metrics", "iteration_counter", self._num_steps

    def _set(self, name: str, kind: str, value: float) -> None:
        key = (name, kind)
        if self._published.get(key) == value:
            return
        if key not in self._series:
            family, label, labels = self._gauges[name]
            self._series[key] = family.Metric(labels={label: kind} | labels)
        self._series[key].set(value)
        self._published[key] = value


def _resident_bytes() -> int:
    """Of this process; Linux's /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
