"""One streamed completion as a client sees it, and many of them at once."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DONE = b"[DONE]"
Body = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request; stop_reading: after so many pieces of text, give_up: after so many seconds (None: neither)."""

    body: Body
    stop_reading: int | None = None
    give_up: float | None = None


@dataclass
class Answer:
    """Times are seconds since the request was sent."""

    text: str = ""
    arrivals: list[float] = field(default_factory=list)  # of each piece of text
    num_tokens: int = 0
    finish_reason: str | None = None
    seconds: float = 0.0
    left_early: bool = False
    error: str | None = None

    @property
    def time_per_token(self) -> float | None:
        """From the first piece to the last, over the tokens after the first; None with fewer than two pieces."""
        if len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.num_tokens - 1, 1)


async def ask_all(
    url: str, asks: Iterable[Ask], concurrency: int, on_answer: Callable[[int], None] = lambda _: None
) -> tuple[list[Answer], float]:
    """So many at a time, each followed by the next one; the answers in order, and the seconds of all together.

    on_answer is called with the number of answers so far.
    """
    queue, answers = iter(enumerate(asks)), dict[int, Answer]()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for index, each in queue:
                answers[index] = await ask(session, url, each)
                on_answer(len(answers))

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return [answers[index] for index in sorted(answers)], time.perf_counter() - start


async def ask(session: aiohttp.ClientSession, url: str, what: Ask) -> Answer:
    """Never raises what a server can cause: that is the answer's error."""
    answer, start = Answer(), time.perf_counter()
    try:
        await asyncio.wait_for(_read(session, f"{url}/v1/completions", what, answer, start), what.give_up)
    except asyncio.TimeoutError:
        answer.left_early = what.give_up is not None
        answer.error = None if answer.left_early else "the server sent nothing for too long"
    except (aiohttp.ClientError, ValueError, LookupError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - start
    return answer


async def _read(session: aiohttp.ClientSession, url: str, what: Ask, answer: Answer, start: float) -> None:
    body = {**what.body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url, json=body) as response:
        if response.status != 200:
            answer.error = f"status {response.status}: {await response.text()}"
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == DONE:
                answer.error = None if answer.finish_reason else "no finish reason"
                return
            _take(json.loads(data), answer, time.perf_counter() - start)
            if answer.error is not None:
                return
            if what.stop_reading is not None and len(answer.arrivals) >= what.stop_reading:
                answer.left_early = True
                response.close()
                return
        answer.error = "the stream ended without [DONE]"


def _take(chunk: dict[str, Any], answer: Answer, now: float) -> None:
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
        return
    for choice in chunk["choices"]:
        if choice["text"]:
            answer.text += choice["text"]
            answer.arrivals.append(now)
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]


def gaps(answers: Iterable[Answer]) -> Iterator[float]:
    """Seconds between pieces of text, of all answers."""
    for answer in answers:
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            yield after - before
