"""The numbers of a server: each against what the outputs themselves say, over whole runs of many requests."""

import re
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from magicdec.errors import EngineFailedError, NotReadyError, QueueFullError, RequestError
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.serving.metrics import EngineMetrics
from magicdec.runtime.serving.metrics_mirror import Kind, MetricsMirror
from tests.support import toy
from tests.support.paths import ROOT

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Run:
    """An engine with its metrics, and every output that it gave."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.engine = engine
        self.metrics = EngineMetrics(self.registry, SimpleNamespace(engine=engine))
        self.outputs: list[list[RequestOutput]] = []  # of each step
        self.final: dict[str, RequestOutput] = {}

    def add(self, name: str, prompt: list[int], **params: Any) -> None:
        """A request arrives."""
        self.metrics.submitted(name)
        self.engine.add_request(name, prompt, SamplingParams(**params))

    def step(self) -> None:
        """One step, reported."""
        outputs = self.engine.step()
        self.metrics.stepped(outputs, 0.25)
        self.outputs.append(outputs)
        self.final.update({out.request_id: out for out in outputs if out.finished})

    def drain(self) -> None:
        """All of it."""
        while self.engine.has_unfinished_requests:
            self.step()

    def abort(self, name: str) -> None:
        """A request is given up."""
        output = self.engine.abort(name)
        assert output is not None
        self.metrics.finished(output)
        self.final[name] = output

    def value(self, name: str, **labels: str) -> float:
        """A sample as a scraper reads it."""
        value = self.registry.get_sample_value(f"magicdec:{name}", labels)
        assert value is not None, f"no {name} with {labels}"
        return value

    def total(self, name: str) -> float:
        """Over all final outputs, as the outputs' own metrics say."""
        return sum(float(getattr(out.metrics, name)) for out in self.final.values())


@pytest.fixture
def run() -> Run:
    """Sixteen requests in a batch of four, with too few blocks for four of full length, and shared prefixes."""
    run = Run(toy.engine("self", num_blocks=24, max_num_tokens=24))
    for index in range(16):
        own = {"num_draft_tokens": index % 4, "n": 1 + (index == 7)}
        run.add(str(index), [1 + index % 3] * (5 + index), max_tokens=20 + index, seed=index, **GREEDY | own)
    run.drain()
    assert run.total("num_preemptions") > 0
    assert run.total("num_cached_tokens") > 0
    assert 0 < run.total("num_accepted_tokens") < run.total("num_draft_tokens")
    return run


def test_tokens_drafts_and_blocks_add_up(run: Run) -> None:
    """Counted step by step, they equal the sums over the finished requests."""
    outputs = run.final.values()
    assert run.value("generation_tokens_total") == run.total("num_output_tokens")
    assert run.value("prompt_tokens_total") == run.total("num_prompt_tokens")
    assert run.value("prefix_cache_hits_total") == run.total("num_cached_tokens")
    queries = sum(out.metrics.num_prompt_tokens * len(out.outputs) for out in outputs)
    assert run.value("prefix_cache_queries_total") == queries
    assert run.value("num_preemptions_total") == run.total("num_preemptions")
    assert run.value("spec_decode_num_drafts_total") == run.total("num_rounds")
    assert run.value("spec_decode_num_draft_tokens_total") == run.total("num_draft_tokens")
    assert run.value("spec_decode_num_accepted_tokens_total") == run.total("num_accepted_tokens")
    assert run.value("request_success_total", finished_reason="length") == 17
    assert run.value("kv_cache_blocks", state="free") == 24
    assert run.value("kv_cache_usage_perc") == run.value("num_requests_running") == 0


def test_acceptance_by_position(run: Run) -> None:
    """Place j of a draft counts where at least j + 1 tokens were drafted, and accepted where as many were kept."""
    for position in range(3):
        at = {"position": str(position)}
        drafted = accepted = 0
        for out in run.final.values():
            drafted += sum(count for length, count in out.metrics.draft_lengths.items() if length > position)
            accepted += sum(count for length, count in out.metrics.accepted_lengths.items() if length > position)
        assert run.value("spec_decode_num_draft_tokens_per_pos_total", **at) == drafted > 0
        assert run.value("spec_decode_num_accepted_tokens_per_pos_total", **at) == accepted > 0
    for name, total in (("draft", "num_draft_tokens"), ("accepted", "num_accepted_tokens")):
        family = f"spec_decode_num_{name}_tokens_per_pos_total"
        assert sum(run.value(family, position=str(j)) for j in range(3)) == run.total(total)
    steps = [run.value("spec_decode_num_steps_total", draft_length=str(length)) for length in range(4)]
    assert all(steps)
    assert sum(steps[1:]) == run.total("num_rounds")


def test_times(run: Run) -> None:
    """One first token and one end a request; a delivery later is a gap between tokens."""
    deliveries = sum(len(outputs) for outputs in run.outputs)
    assert run.value("time_to_first_token_seconds_count") == run.value("request_queue_time_seconds_count") == 16
    assert (
        run.value("e2e_request_latency_seconds_count") == run.value("request_time_per_output_token_seconds_count") == 16
    )
    assert run.value("inter_token_latency_seconds_count") == deliveries - 16
    assert run.value("engine_step_seconds_sum") == 0.25 * len(run.outputs)
    first, queue, prefill = (
        run.value(f"{name}_seconds_sum")
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time")
    )
    assert first == pytest.approx(queue + prefill)
    assert prefill == pytest.approx(run.total("prefill_seconds") - run.total("queue_seconds"))
    assert queue > prefill, "twelve of sixteen had to wait"
    assert run.value("request_decode_time_seconds_sum") == pytest.approx(run.total("decode_seconds"))
    assert run.value("inter_token_latency_seconds_sum") == pytest.approx(run.total("decode_seconds"), rel=0.2)
    assert run.value("e2e_request_latency_seconds_sum") > first + run.value("inter_token_latency_seconds_sum") * 0.99


def test_times_by_a_clock_of_its_own() -> None:
    """Time to the first token, gaps and the whole, in exact numbers."""
    now = 0.0
    run = Run(toy.engine("plain"))
    run.metrics = EngineMetrics(registry := CollectorRegistry(), SimpleNamespace(engine=run.engine), clock=lambda: now)
    run.registry = registry
    run.add("0", [1, 2, 3], max_tokens=3, **GREEDY)
    for now in (4.0, 5.0, 7.0):  # noqa: B007 - read by the clock
        run.step()
    assert run.value("time_to_first_token_seconds_sum") == 4
    assert run.value("inter_token_latency_seconds_sum") == 3
    assert run.value("inter_token_latency_seconds_bucket", le="1.0") == 1
    assert run.value("e2e_request_latency_seconds_sum") == 7


def test_gauges_follow_the_engine() -> None:
    """After every step and abort they say what the engine holds."""
    run = Run(toy.engine("in_cache", num_blocks=30, max_batch_size=2))
    for index in range(4):
        run.add(str(index), [1] * 9, max_tokens=30, **GREEDY)
    seen = set()
    while run.engine.has_unfinished_requests:
        run.step()
        if len(run.outputs) == 5:
            run.abort("1")
        running, waiting = run.value("num_requests_running"), run.value("num_requests_waiting")
        assert (running, waiting) == (len(run.engine.scheduler.running), len(run.engine.scheduler.waiting))
        used = run.engine.blocks.num_used_blocks
        assert run.value("kv_cache_blocks", state="used") == used == 30 - run.value("kv_cache_blocks", state="free")
        assert run.value("kv_cache_usage_perc") == used / 30
        seen.add((running, waiting))
    assert {(2, 2), (2, 1), (0, 0)} <= seen
    assert run.value("request_success_total", finished_reason="abort") == 1
    assert run.value("request_success_total", finished_reason="length") == 3


def test_requests_that_end_early() -> None:
    """Aborted before the first token, failed, refused: each is counted once, and has no time to a first token."""
    run = Run(toy.engine("ngram"))
    run.add("0", [1, 2, 3], max_tokens=4, **GREEDY)
    run.abort("0")
    run.metrics.submitted("1")
    run.metrics.failed("1")
    run.metrics.refused("queue_full")
    assert run.value("request_success_total", finished_reason="abort") == 1
    assert run.value("request_success_total", finished_reason="error") == 1
    assert run.value("request_refused_total", reason="queue_full") == 1
    assert run.value("e2e_request_latency_seconds_count") == 1
    for name in ("time_to_first_token", "request_decode_time", "request_time_per_output_token"):
        assert run.value(f"{name}_seconds_count") == 0
    run.add("0", [1, 2, 3], max_tokens=1, **GREEDY)  # the name is free again
    run.drain()
    assert run.value("request_decode_time_seconds_count") == 1
    assert run.value("request_time_per_output_token_seconds_count") == 0, "there is none after the first"


class Elsewhere:
    """Another system's metrics, which take only what Triton's take."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.kinds: dict[str, Kind] = {}
        self.calls = 0

    def new_family(self, name: str, description: str, kind: Kind) -> Any:
        """A family that is made once."""
        assert name not in self.kinds
        assert description
        self.kinds[name] = kind
        outer = self

        class Metric:
            def __init__(self, *, labels: dict[str, str]) -> None:
                self.key = (name, tuple(labels.items()))
                assert self.key not in outer.values
                outer.values[self.key] = 0.0

            def set(self, value: float) -> None:
                assert kind == "gauge"
                outer.values[self.key] = value
                outer.calls += 1

            def increment(self, value: float) -> None:
                assert kind == "counter"
                assert value > 0
                outer.values[self.key] += value
                outer.calls += 1

        return SimpleNamespace(Metric=Metric)


def test_mirror_has_every_series() -> None:
    """At every publication; and nothing is sent twice."""
    run, there = Run(toy.engine("self")), Elsewhere()
    mirror = MetricsMirror(run.registry, there.new_family)
    for index in range(3):
        run.add(str(index), [1, 2, 3], max_tokens=12, **GREEDY)
    while run.engine.has_unfinished_requests:
        run.step()
        mirror.publish()
        calls = there.calls
        mirror.publish()
        assert there.calls == calls
        here = {
            (sample.name, tuple(sample.labels.items())): sample.value
            for family in run.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        assert there.values == pytest.approx(here)
    assert there.kinds["magicdec:num_requests_running"] == "gauge"
    assert (
        there.kinds["magicdec:generation_tokens_total"]
        == there.kinds["magicdec:engine_step_seconds_bucket"]
        == "counter"
    )


def test_async_llm_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, aborts, deadlines and refusals, from the threads of a server; counted before the reader sees the end."""
    engine, registry = toy.engine("self"), CollectorRegistry()
    llm = cast(LLM, SimpleNamespace(engine=engine, tokenizer=engine.tokenizer))
    add, tokens, ends = engine.add, 0, dict.fromkeys(("length", "abort", "error"), 0)

    def refuse_one(name: str, *rest: Any) -> None:
        if name == "7":
            raise RequestError("not this one")
        add(name, *rest)

    monkeypatch.setattr(engine, "add", refuse_one)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"magicdec:{name}", labels)

    metrics = EngineMetrics(registry, llm)
    with AsyncLLM(llm, max_queue_size=12, metrics=metrics) as served:
        for index in range(8):
            params = SamplingParams(max_tokens=10 if index % 2 else 190, **GREEDY)
            stream = served.submit([1, 2, 3], params, timeout=1e-4 if index == 4 else None)
            if index in (0, 2):
                next(stream)
                stream.abort()
            try:
                output = list(stream)[-1]
            except RequestError:
                ends["error"] += 1
            else:
                tokens += output.metrics.num_output_tokens
                ends[str(output.outputs[0].finish_reason)] += 1
            for reason, count in ends.items():
                assert value("request_success_total", finished_reason=reason) == count
        with pytest.raises(RequestError):
            served.submit([99], SamplingParams())
        streams = [served.submit([1], SamplingParams(max_tokens=190, **GREEDY)) for _ in range(12)]
        with pytest.raises(QueueFullError):
            served.submit([1], SamplingParams())
        for stream in streams:
            stream.abort()
            tokens += list(stream)[-1].metrics.num_output_tokens
    with pytest.raises(NotReadyError):
        served.submit([1], SamplingParams())
    assert not metrics._open, "nothing is kept of a request that has ended"
    assert ends["error"] == 1
    assert ends["length"] >= 3
    assert ends["abort"] >= 1, "a deadline of 0.1 ms and two aborts after the first tokens"
    assert value("generation_tokens_total") == tokens
    assert [value("request_refused_total", reason=r) for r in ("bad_request", "queue_full", "not_ready")] == [1, 1, 1]
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0


def test_async_llm_tells_of_a_broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was open has failed, even if the count itself is what broke."""
    engine, registry = toy.engine("plain"), CollectorRegistry()
    llm = cast(LLM, SimpleNamespace(engine=engine, tokenizer=engine.tokenizer))
    metrics = EngineMetrics(registry, llm)
    gate = threading.Event()

    def break_down(*_: object) -> None:
        assert gate.wait(20)
        raise ZeroDivisionError

    monkeypatch.setattr(metrics, "stepped", break_down)
    served = AsyncLLM(llm, metrics=metrics)
    streams = [served.submit([1, 2], SamplingParams(max_tokens=1, **GREEDY)) for _ in range(3)]
    gate.set()
    for stream in streams:
        with pytest.raises(EngineFailedError):
            list(stream)
    served.drain(20)
    assert registry.get_sample_value("magicdec:request_success_total", {"finished_reason": "error"}) == 3


def test_every_number_is_documented() -> None:
    """By the name of its family; and the page names no other."""
    registry = CollectorRegistry()
    EngineMetrics(registry, SimpleNamespace(engine=toy.engine("plain")))
    families = {
        family.name.removeprefix("magicdec:") + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)", page, flags=re.MULTILINE)) == families
