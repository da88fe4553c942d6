"""What a server counts: told by the thread that runs the engine, read by whoever publishes the registry."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter

from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.outputs import RequestMetrics, RequestOutput
from magicdec.runtime.serving.engine_events import EngineEvents, Refusal
from magicdec.runtime.serving.metric_families import MetricFamilies


class HasEngine(Protocol):
    """An `LLM`, or what stands for one."""

    @property
    def engine(self) -> Engine:
        """What is measured."""
        ...


@dataclass
class _Progress:
    """What is already counted of an open request."""

    arrival: float  # of the clock, as are the others
    last_delivery: float = 0.0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class EngineMetrics(EngineEvents):
    """Turns what happens to requests into the numbers of `MetricFamilies`."""

    def __init__(
        self, registry: CollectorRegistry, llm: HasEngine, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.families = MetricFamilies(registry, llm.engine.max_draft_len)
        self._scheduler, self._blocks = llm.engine.scheduler, llm.engine.blocks
        self._clock = clock
        self._open: dict[str, _Progress] = {}
        self._sums: defaultdict[Counter, float] = defaultdict(float)  # counted, and not yet published
        self._set_gauges()

    def submitted(self, request_id: str) -> None:
        """A request was taken; its times count from now."""
        self._open[request_id] = _Progress(self._clock())

    def refused(self, reason: Refusal) -> None:
        """A request was not taken."""
        self.families.refused[reason].inc()

    def stepped(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """The engine made a step of so many seconds, which gave these outputs."""
        self.families.step.observe(seconds)
        for output in outputs:
            self._count(output)
        self._publish()

    def finished(self, output: RequestOutput) -> None:
        """A request ended between steps, e.g. by an abort."""
        self._count(output)
        self._publish()

    def failed(self, request_id: str) -> None:
        """A request ended without an output, since the engine broke down or would not have it."""
        self._open.pop(request_id, None)  # what broke may be the count of its last output
        self.families.success["error"].inc()
        self._set_gauges()

    def _count(self, output: RequestOutput) -> None:
        """All that is new since the request's last output."""
        progress, now = self._open[output.request_id], self._clock()
        old, new = progress.metrics, output.metrics
        progress.metrics = new
        if new.num_output_tokens > old.num_output_tokens:
            self._count_tokens(output, progress, old, now)
        self._sums[self.families.prefix_hits] += new.num_cached_tokens - old.num_cached_tokens
        self._sums[self.families.preemptions] += new.num_preemptions - old.num_preemptions
        if new.draft_lengths != old.draft_lengths:
            self._count_drafts(old, new)
        if output.finished:
            self._count_end(output, progress, now)

    def _count_tokens(self, output: RequestOutput, progress: _Progress, old: RequestMetrics, now: float) -> None:
        new, families, sums = output.metrics, self.families, self._sums
        sums[families.generation_tokens] += new.num_output_tokens - old.num_output_tokens
        if old.num_output_tokens:
            families.inter_token.observe(now - progress.last_delivery)
        else:
            first_token = now - progress.arrival
            in_batch = new.prefill_seconds - new.queue_seconds
            families.first_token.observe(first_token)
            families.prefill.observe(in_batch)
            families.queue.observe(first_token - in_batch)  # the way to the engine is part of it
            sums[families.prompt_tokens] += new.num_prompt_tokens
            sums[families.prefix_queries] += new.num_prompt_tokens * len(output.outputs)
        progress.last_delivery = now

    def _count_drafts(self, old: RequestMetrics, new: RequestMetrics) -> None:
        families, sums = self.families, self._sums
        sums[families.drafts] += new.num_rounds - old.num_rounds
        sums[families.draft_tokens] += new.num_draft_tokens - old.num_draft_tokens
        sums[families.accepted_tokens] += new.num_accepted_tokens - old.num_accepted_tokens
        for length, count in _more(old.draft_lengths, new.draft_lengths):
            sums[families.draft_lengths[length]] += count
            for position in range(length):
                sums[families.draft_tokens_at[position]] += count
        for length, count in _more(old.accepted_lengths, new.accepted_lengths):
            for position in range(length):
                sums[families.accepted_tokens_at[position]] += count

    def _count_end(self, output: RequestOutput, progress: _Progress, now: float) -> None:
        del self._open[output.request_id]
        self.families.latency.observe(now - progress.arrival)
        for each in output.outputs:
            self.families.success[each.finish_reason].inc()
        longest = max(len(each.token_ids) for each in output.outputs)
        if longest:
            self.families.decode.observe(output.metrics.decode_seconds)
        if longest > 1:
            self.families.per_token.observe(output.metrics.decode_seconds / (longest - 1))

    def _publish(self) -> None:
        """Once a step: a counter has a lock, and a step has many requests."""
        for counter, amount in self._sums.items():
            counter.inc(amount)
        self._sums.clear()
        self._set_gauges()

    def _set_gauges(self) -> None:
        families, blocks = self.families, self._blocks
        families.running.set(len(self._scheduler.running))
        families.waiting.set(len(self._scheduler.waiting))
        families.kv_free.set(blocks.num_free_blocks)
        families.kv_used.set(blocks.num_used_blocks)
        families.kv_usage.set(blocks.num_used_blocks / blocks.num_blocks)


def _more(old: Mapping[int, int], new: Mapping[int, int]) -> list[tuple[int, int]]:
    """Which counts have grown, and by how much."""
    return [(key, count - old.get(key, 0)) for key, count in new.items() if count > old.get(key, 0)]
