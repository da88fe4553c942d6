"""A batch of long prompts at a fixed concurrency, plain and speculative in turn on one server."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from client import Answer, Ask, ask_all, gaps
from server import Server

# An instruct model this small soon repeats itself without the penalty, which would flatter the acceptance.
SAMPLING = {"temperature": 0, "frequency_penalty": 0.3, "ignore_eos": True}


@dataclass(frozen=True)
class Load:
    """How much; output_tokens a request. draft_tokens: of the way to decode that fixes them."""

    concurrency: int
    output_tokens: int
    repeats: int
    draft_tokens: int

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """What a request says; without a number the server chooses, at each step."""
        fixed = {"plain": 0, f"{self.draft_tokens} drafts": self.draft_tokens}
        return {**{name: {"num_draft_tokens": number} for name, number in fixed.items()}, "auto": {}}


def measure_load(server: Server, model: str, prompts: Sequence[Sequence[int]], load: Load) -> dict[str, Any]:
    """Runs by way, in mirrored order; and what must hold: no errors, equal texts, no block lost."""
    warm_up(server, model, prompts, load)
    before = server.wait_until_idle()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in load.ways}
    texts: list[list[str]] = []
    for repeat in range(load.repeats):
        for way in list(load.ways) if repeat % 2 == 0 else reversed(load.ways):
            run, answers = measure_run(server, model, prompts, load, way)
            runs[way].append(run)
            texts.append([answer.text for answer in answers])
    after = server.wait_until_idle()
    free = 'kv_cache_blocks{state="free"}'
    return {
        "requests": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "concurrency": load.concurrency,
        "output_tokens": load.output_tokens,
        "runs": runs,
        "same_texts": sum(len(set(each)) == 1 for each in zip(*texts, strict=True)),
        "free_blocks": [before[free], after[free]],
    }


def warm_up(server: Server, model: str, prompts: Sequence[Sequence[int]], load: Load) -> None:
    """All ways, with the ends of prompts, so that none is the first to run, and none finds its prompts read."""
    for way in load.ways:
        measure_run(server, model, [prompt[-100:] for prompt in prompts[: load.concurrency]], load, way)


def measure_run(
    server: Server, model: str, prompts: Sequence[Sequence[int]], load: Load, way: str
) -> tuple[dict[str, Any], list[Answer]]:
    """One way; figures from the client's clock, and from the server's counters."""
    asks = [
        Ask({"model": model, "prompt": list(prompt), "max_tokens": load.output_tokens, **SAMPLING, **load.ways[way]})
        for prompt in prompts
    ]
    before = server.metrics()
    answers, seconds = asyncio.run(ask_all(server.url, asks, load.concurrency))
    return client_figures(answers, seconds) | server_figures(before, server.metrics()), answers


def client_figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Throughput, and times in seconds as [median, 99th percentile]."""
    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.num_tokens for answer in good)
    return {
        "seconds": seconds,
        "errors": [answer.error for answer in answers if answer.error is not None],
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "time_to_first_token": percentiles(answer.arrivals[0] for answer in good if answer.arrivals),
        "inter_token_latency": percentiles(gaps(good)),
        "time_per_output_token": percentiles(
            answer.time_per_token for answer in good if answer.time_per_token is not None
        ),
        "request_latency": percentiles(answer.seconds for answer in good),
    }


def server_figures(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Of one run: what speculation did, and whether prompts were read or found."""

    def grown(name: str) -> float:
        return after[name] - before[name]

    drafts, drafted = grown("spec_decode_num_drafts_total"), grown("spec_decode_num_draft_tokens_total")
    accepted = grown("spec_decode_num_accepted_tokens_total")
    lengths = [name for name in after if name.startswith("spec_decode_num_steps_total")]
    return {
        "prefix_hits": grown("prefix_cache_hits_total"),
        "preemptions": grown("num_preemptions_total"),
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_lengths": {name.split('"')[1]: grown(name) for name in lengths if grown(name)},
    }


def percentiles(values: Iterable[float | None]) -> list[float] | None:
    """Median and 99th; None of nothing."""
    array = np.array(list(values), dtype=float)
    return [float(value) for value in np.percentile(array, [50, 99])] if array.size else None
