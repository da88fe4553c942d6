"""Thousands of short requests, many of which are given up at random: does memory stay where it is, and do blocks?"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

from client import Ask, ask_all
from server import Server

VOCABULARY = 1000  # token ids to draw prompts from
SAMPLES = 20  # of memory


def measure_soak(server: Server, model: str, count: int, concurrency: int, seed: int = 0) -> dict[str, Any]:
    """Half of the cancels come after some text, half after some time, which may be in the queue."""
    before = server.wait_until_idle()
    memory, every = [server.memory], max(count // SAMPLES, 1)

    def sample(done: int) -> None:
        if done % every == 0:
            memory.append(server.memory)

    answers, seconds = asyncio.run(
        ask_all(server.url, short_requests(model, count, random.Random(seed)), concurrency, sample)
    )
    after = server.wait_until_idle()
    free = 'kv_cache_blocks{state="free"}'
    return {
        "requests": count,
        "concurrency": concurrency,
        "seconds": seconds,
        "cancelled": sum(answer.left_early for answer in answers),
        "aborted": _grown(before, after, 'request_success_total{finished_reason="abort"}'),
        "errors": [answer.error for answer in answers if answer.error is not None],
        "tokens": _grown(before, after, "generation_tokens_total"),
        "memory": memory,
        "free_blocks": [before[free], after[free]],
    }


def short_requests(model: str, count: int, draw: random.Random) -> Iterator[Ask]:
    """Prompts of up to 64 tokens and answers of up to 32, greedy and sampled; four in ten may be given up."""
    for _ in range(count):
        max_tokens, fate = draw.randint(1, 32), draw.random()
        body = {
            "model": model,
            "prompt": [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 64))],
            "max_tokens": max_tokens,
            "temperature": draw.choice([0, 0.8]),
            "seed": draw.randrange(1 << 30),
        }
        yield Ask(
            body,
            stop_reading=draw.randint(1, 4) if fate < 0.2 else None,
            give_up=draw.uniform(0.001, 0.3) if fate > 0.8 else None,
        )


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]
