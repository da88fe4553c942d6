"""A step that fails: of one request, it is that request's answer; of the engine, it ends all and is seen by probes."""

import itertools
import json
from typing import Any

import openai
import pytest
import torch

from magicdec.runtime.engine.scheduler import SchedulerOutput
from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.answers.pieces import Piece, PieceReader
from magicdec.runtime.outputs import CompletionOutput
from tests.runtime.openai.serving import MODEL, SECONDS, held, serving, wait_until

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def test_engine_that_dies(pair: str) -> None:
    """No stream hangs, no code says that all is well, and the server goes on telling so."""
    llm = LLM(pair)
    with serving(llm) as served:
        with held(llm) as gate:
            gate.release(6)
            with served.stream("/v1/completions", LONG) as events:
                next(events)
                waiting = [served.later("/v1/completions", {**LONG, "prompt": [text, "b"]}) for text in "cde"]
                wait_until(lambda: served.llm.num_open_requests == 7, "all are open")
                llm.engine.scheduler.schedule = _explode  # type: ignore[method-assign, assignment]
                gate.release(10)
                *_, failure, done = events
        assert json.loads(failure)["error"]["code"] == "engine_failed"
        assert "the cause" in json.loads(failure)["error"]["message"]
        assert done == "[DONE]"
        for each in waiting:
            answer = each.result(SECONDS)
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
        for probe in ("/ready", "/health"):
            answer = served.http.get(probe)
            assert answer.status_code == 503
            assert answer.json() == {"status": "failed", "error": "RuntimeError: the cause"}
        answer = served.post("/v1/completions", {**LONG, "stream": True})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "the cause" in answer.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError):
            served.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert served.http.get("/version").status_code == 200
        assert served.http.get("/metrics").status_code == 200


def test_request_that_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's numbers may fail in the middle of a stream: an error event; the next request is served."""
    forward, failing = llm.runner.forward, list[bool]()

    def broken(inputs: Any) -> torch.Tensor:
        logits = forward(inputs)
        return torch.full_like(logits, float("nan")) if failing else logits

    monkeypatch.setattr(llm.runner, "forward", broken)
    with serving(llm) as served, held(llm) as gate:
        gate.release(3)
        with served.stream("/v1/completions", LONG) as events:
            next(events)
            failing.append(True)
            gate.release(3)
            *_, failure, done = events
        assert json.loads(failure)["error"]["code"] == "generation_failed"
        assert done == "[DONE]"
        gate.release(3)
        for stream in (False, True):
            answer = served.post("/v1/completions", {**LONG, "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "generation_failed"
        failing.clear()
        gate.release(10)
        assert served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
        assert served.http.get("/ready").status_code == 200


@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=["one", "three"])
def test_bug_in_the_middle_of_a_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: Any) -> None:
    """An error event; what was to be written is not made any more."""
    read, calls = PieceReader.read, itertools.count()

    def fail_later(self: PieceReader, output: CompletionOutput) -> Piece | None:
        if next(calls) < 3:
            return read(self, output)
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(PieceReader, "read", fail_later)
    with serving(llm) as served, held(llm) as gate:
        gate.release(10)
        with served.stream("/v1/completions", {**LONG, "prompt": prompt}) as events:
            *_, failure, done = events
            assert json.loads(failure)["error"]["code"] == "internal_error"
            assert done == "[DONE]"
            while gate.acquire(blocking=False):
                pass
            gate.release()
            wait_until(served.is_idle, "freed within a step")


def _explode(*_: object) -> SchedulerOutput:
    raise RuntimeError("the cause")
