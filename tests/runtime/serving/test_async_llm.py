"""Many callers of one engine: every stream ends, equals the engine's own answer, and leaves nothing behind."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from magicdec.errors import EngineFailedError, NotReadyError, QueueFullError, RequestError
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.serving.request_stream import RequestStream
from tests.support import toy

SECONDS = 20.0  # that nothing here takes, unless it hangs
PROMPT = [1, 5, 2, 9]
LONG = SamplingParams(max_tokens=150, ignore_eos=True, temperature=0)


@contextmanager
def serving(engine: Engine | None = None, **options: Any) -> Iterator[AsyncLLM]:
    """An AsyncLLM on a toy engine; whatever a test does, the engine's invariants hold at the end."""
    engine = engine or toy.engine("self")
    served = AsyncLLM(cast(LLM, SimpleNamespace(engine=engine, tokenizer=engine.tokenizer)), **options)
    try:
        yield served
    finally:
        served.drain(SECONDS)
    if served.status == "stopped":
        assert served.num_open_requests == 0
        toy.check_integrity(engine)


def held(engine: Engine) -> tuple[Engine, threading.Semaphore]:
    """The engine, whose every step waits for a release of the semaphore."""
    gate, step = threading.Semaphore(0), engine.step

    def wait_and_step() -> list[RequestOutput]:
        assert gate.acquire(timeout=SECONDS)
        return step()

    engine.step = wait_and_step  # type: ignore[method-assign]
    return engine, gate


def last(stream: RequestStream) -> RequestOutput:
    """The answer in full; within SECONDS, or the test fails instead of hanging."""
    found: list[RequestOutput | Exception] = []

    def read() -> None:
        try:
            found.extend(stream)
        except Exception as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(SECONDS)
    assert not reader.is_alive(), "the stream hangs"
    if isinstance(found[-1], Exception):
        raise found[-1]
    return found[-1]


def said(output: RequestOutput) -> list[object]:
    """What neighbours may not change; how drafts fared (token_origins) depends on the room that they leave."""
    return [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in output.outputs]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_threads_and_event_loops_get_what_the_engine_alone_gives() -> None:
    params = [
        SamplingParams(max_tokens=5 + 3 * i, seed=i, temperature=i % 3 / 2, n=1 + i % 2, logprobs=1) for i in range(12)
    ]
    prompts = [[1 + (i + j) % 15 for j in range(3 + 5 * i)] for i in range(12)]
    expected = toy.run(toy.engine("self"), prompts, params)

    async def read(served: AsyncLLM, index: int) -> RequestOutput:
        async for output in served.submit(prompts[index], params[index], request_id=f"loop {index}"):
            newest = output
        return newest

    async def read_all(served: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.wait_for(asyncio.gather(*(read(served, i) for i in range(12))), SECONDS)

    with serving() as served:
        streams = [served.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        by_loop = asyncio.run(read_all(served))
        by_thread = [last(stream) for stream in streams]
    for one, two, three in zip(expected, by_loop, by_thread, strict=True):
        assert said(one) == said(two) == said(three)
        assert two.finished


def test_outputs_are_cumulative_and_a_slow_reader_gets_the_newest() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        stream = served.submit(PROMPT, LONG)
        gate.release()
        first = next(stream)
        assert len(first.outputs[0].token_ids) == 1
        gate.release(10)
        wait_until(lambda: len(engine.scheduler.running[0].token_ids) == len(PROMPT) + 11)
        gate.release(1000)
        assert len(last(stream).outputs[0].token_ids) == 150


def test_random_aborts_leave_no_block_and_no_request() -> None:
    rng, engine = random.Random(0), toy.engine("in_cache")
    with serving(engine) as served:
        for _ in range(8):
            streams = [served.submit(PROMPT, LONG) for _ in range(6)]
            for stream in streams[:3]:
                time.sleep(rng.random() / 500)
                stream.abort()
            outputs = [last(stream) for stream in streams]
            assert all(output.finished for output in outputs)
            assert {output.outputs[0].finish_reason for output in outputs[:3]} <= {"abort", "length"}
            assert {output.outputs[0].finish_reason for output in outputs[3:]} == {"length"}
        wait_until(lambda: not engine.has_unfinished_requests)
        toy.check_integrity(engine)


def test_leaving_a_stream_early_aborts_it() -> None:
    async def look(served: AsyncLLM) -> None:
        async with served.submit(PROMPT, LONG) as stream:
            await anext(stream)

    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        gate.release(2)
        with served.submit(PROMPT, LONG) as stream:
            next(stream)
        gate.release(2)
        asyncio.run(asyncio.wait_for(look(served), SECONDS))
        gate.release(4)
        wait_until(lambda: served.num_open_requests == 0)
        assert engine.blocks.num_used_blocks == 0


def test_a_stream_never_aborts_a_later_request_of_its_name() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        old = served.submit(PROMPT, SamplingParams(max_tokens=1), request_id="x")
        gate.release()
        last(old)
        new = served.submit(PROMPT, LONG, request_id="x")
        assert not old.abort()
        gate.release(1000)
        assert last(new).outputs[0].finish_reason == "length"


def test_an_abort_and_its_name_used_again_before_the_next_step() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        old = served.submit(PROMPT, SamplingParams(max_tokens=1), request_id="x")
        wait_until(lambda: bool(engine.scheduler.waiting))  # and the step that will end it waits for the gate
        assert served.abort("x")
        gate.release()
        assert last(old).outputs[0].finish_reason == "length"
        new = served.submit(PROMPT, LONG, request_id="x")
        gate.release(1000)
        assert last(new).outputs[0].finish_reason == "length"
        assert not served.abort("nobody")


def test_a_deadline_ends_one_request_and_says_so() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        late, other = served.submit(PROMPT, LONG, timeout=0.05), served.submit(PROMPT, LONG)
        time.sleep(0.1)
        gate.release(1000)
        output = last(late).outputs[0]
        assert (output.finish_reason, output.error) == ("abort", "the request's time limit of 0.05 s is over")
        assert last(other).outputs[0].finish_reason == "length"


def test_refusals_name_the_reason_and_change_nothing() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine, max_queue_size=2) as served:
        with pytest.raises(RequestError, match="the prompt is empty"):
            served.submit([])
        with pytest.raises(RequestError, match="time above 0"):
            served.submit(PROMPT, timeout=0)
        served.submit(PROMPT, LONG, request_id="x")
        with pytest.raises(RequestError, match="'x' is in use"):
            served.submit(PROMPT, LONG, request_id="x")
        served.submit(PROMPT, LONG)
        with pytest.raises(QueueFullError, match="max_queue_size is 2"):
            served.submit(PROMPT, LONG)
        gate.release(1000)
    with pytest.raises(NotReadyError, match="shutting down"):
        served.submit(PROMPT, LONG)
    with pytest.raises(RequestError, match="max_queue_size is 0"):
        AsyncLLM(served._llm, max_queue_size=0)


def test_what_the_engine_refuses_late_fails_that_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.engine("plain")
    add = engine.add

    def refuse_one(name: str, *rest: Any) -> None:
        if name == "bad":
            raise RequestError("not this one")
        add(name, *rest)

    monkeypatch.setattr(engine, "add", refuse_one)
    with serving(engine) as served:
        bad, good = served.submit(PROMPT, LONG, request_id="bad"), served.submit(PROMPT, LONG)
        with pytest.raises(RequestError, match="not this one"):
            last(bad)
        assert last(good).finished


def test_drain_lets_open_requests_end() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        stream = served.submit(PROMPT, LONG)
        drainer = threading.Thread(target=served.drain, args=(SECONDS,))
        drainer.start()
        wait_until(lambda: served.status == "draining")
        gate.release(1000)
        assert last(stream).outputs[0].finish_reason == "length"
        drainer.join(SECONDS)
        assert served.status == "stopped"


def test_drain_aborts_what_does_not_end_in_time() -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        stream = served.submit(PROMPT, LONG)
        gate.release(3)
        next(stream)
        drainer = threading.Thread(target=served.drain, args=(0.0,))
        drainer.start()
        wait_until(lambda: served.status == "draining")
        gate.release(2)
        output = last(stream).outputs[0]
        assert (output.finish_reason, output.error) == ("abort", "the server is shutting down")
        drainer.join(SECONDS)


def test_a_broken_engine_fails_every_stream_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate = held(toy.engine("plain"))
    with serving(engine) as served:
        streams = [served.submit(PROMPT, LONG) for _ in range(3)]
        gate.release(2)
        wait_until(lambda: bool(engine.scheduler.running))

        def fault() -> list[RequestOutput]:
            raise RuntimeError("device lost")

        monkeypatch.setattr(engine, "step", fault)
        gate.release(1000)

        async def read() -> None:
            async for _ in streams[0]:
                pass

        with pytest.raises(EngineFailedError, match="device lost"):
            asyncio.run(asyncio.wait_for(read(), SECONDS))
        for stream in streams[1:]:
            with pytest.raises(EngineFailedError, match="device lost"):
                last(stream)
        assert (served.status, served.error) == ("failed", "RuntimeError: device lost")
        with pytest.raises(NotReadyError, match="device lost"):
            served.submit(PROMPT, LONG)
    assert served.status == "failed"
