"""Every number that a server publishes about its engine, in a Prometheus registry. docs/metrics.md says what they mean.

Where vLLM publishes the same number, the name is vLLM's behind another prefix.
"""

from collections.abc import Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from magicdec.runtime.outputs import FinishReason
from magicdec.runtime.serving.engine_events import Refusal

PREFIX = "magicdec:"
SHORT_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920)


class MetricFamilies:
    """The families, each with a series for every value of its label, so that what never happened reads 0."""

    def __init__(self, registry: CollectorRegistry, max_draft_len: int) -> None:
        self._registry = registry
        self.running = self._gauge("num_requests_running", "Sequences in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch.")
        self.success = self._counters(
            "request_success", "Sequences that have ended.", "finished_reason", get_args(FinishReason)
        )
        self.refused = self._counters("request_refused", "Requests that were not taken.", "reason", get_args(Refusal))

        self.queue = self._histogram("request_queue_time", "From arrival to a place in the batch.", REQUEST_SECONDS)
        self.prefill = self._histogram("request_prefill_time", "From there to the first token.", REQUEST_SECONDS)
        self.decode = self._histogram("request_decode_time", "From first token to last.", REQUEST_SECONDS)
        self.latency = self._histogram("e2e_request_latency", "From arrival to the end.", REQUEST_SECONDS)
        self.first_token = self._histogram("time_to_first_token", "From arrival to first token.", FIRST_TOKEN_SECONDS)
        self.inter_token = self._histogram(
            "inter_token_latency", "Between deliveries of a request's tokens.", SHORT_SECONDS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token", "Decode time over tokens after the first.", SHORT_SECONDS
        )
        self.step = self._histogram("engine_step", "One step of the engine.", SHORT_SECONDS)

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found there.")
        self.preemptions = self._counter("num_preemptions", "Sequences that had to give up their place and blocks.")

        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks that sequences hold; 1 = all.")
        blocks = Gauge(f"{PREFIX}kv_cache_blocks", "KV blocks.", ["state"], registry=registry)
        self.kv_free, self.kv_used = blocks.labels("free"), blocks.labels("used")

        positions = range(max_draft_len)
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts verified.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.draft_tokens_at = self._counters(
            "spec_decode_num_draft_tokens_per_pos",
            "Draft tokens verified, by place in the draft.",
            "position",
            positions,
        )
        self.accepted_tokens_at = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by place in the draft.",
            "position",
            positions,
        )
        self.draft_lengths = self._counters(
            "spec_decode_num_steps",
            "Decoding steps of sequences, by the length of the draft; 0 = plain.",
            "draft_length",
            range(max_draft_len + 1),
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{PREFIX}{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, registry=self._registry)

    def _counters(self, name: str, text: str, label: str, values: Sequence[object]) -> dict[object, Counter]:
        """By the value of the one label."""
        family = Counter(f"{PREFIX}{name}", text, [label], registry=self._registry)
        return {value: family.labels(value) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{PREFIX}{name}_seconds", f"{text} Seconds.", buckets=buckets, registry=self._registry)
