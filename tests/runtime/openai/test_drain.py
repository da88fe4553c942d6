"""Leaving in good order: what is open may end, what is new is told to go elsewhere."""

import json
import logging
import socket
from typing import Any

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.server import bound_socket
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.serving import SECONDS, held, serving, slowed, wait_until

PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "seed": 5}


def test_open_requests_end(llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True, seed=5))[0].outputs[0].text
    with serving(llm, drain_timeout=SECONDS) as served, held(llm) as gate:
        gate.release(2)
        with served.stream("/v1/completions", LONG) as events:
            texts = [_text(next(events))]
            waiting = served.later("/v1/completions", LONG)
            wait_until(lambda: served.llm.num_open_requests == 2, "both are open")
            served.server.stop()
            wait_until(lambda: served.llm.status == "draining", "it drains")
            assert served.http.get("/ready").status_code == 503
            assert served.http.get("/health").status_code == 200
            for stream in (False, True):
                refusal = served.post("/v1/completions", {"prompt": "hi", "stream": stream})
                assert refusal.status_code == 503
                assert refusal.json()["error"]["code"] == "not_ready"
                assert refusal.headers["retry-after"]
            gate.release(1000)
            texts += [_text(event) for event in events if event != "[DONE]"]
        assert "".join(texts) == expected
        assert waiting.result(SECONDS).json()["choices"][0]["text"] == expected
        wait_until(lambda: served.llm.status == "stopped", "it stops")


@pytest.mark.parametrize("twice", [False, True], ids=["time is over", "second signal"])
def test_what_does_not_end_is_ended(llm: LLM, twice: bool) -> None:
    """With an error, not as if it were whole."""
    with serving(llm, drain_timeout=SECONDS if twice else 0.3) as served, slowed(llm, 0.02):
        with served.stream("/v1/completions", {**LONG, "max_tokens": 1500, "num_draft_tokens": 0}) as events:
            next(events)
            waiting = served.later("/v1/completions", {**LONG, "max_tokens": 1500, "num_draft_tokens": 0})
            wait_until(lambda: served.llm.num_open_requests == 2, "both are open")
            served.server.stop()
            if twice:
                wait_until(lambda: served.llm.status == "draining", "it drains")
                served.server.stop()
            *_, failure, done = events
        assert json.loads(failure)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        answer = waiting.result(SECONDS)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        wait_until(lambda: served.llm.status == "stopped", "it stops")


def test_a_client_that_does_not_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds up neither the engine nor the others, and not for long the end."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("magicdec.runtime.openai.server.FLUSH_SECONDS", 0.3)
    monkeypatch.setattr("tests.runtime.openai.serving.bound_socket", _with_small_buffer)
    body = json.dumps({**LONG, "prompt": ["a"] * 4, "stream": True, "magicdec_details": True, "num_draft_tokens": 0})
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with serving(llm) as served:
            host, port = served.url.removeprefix("http://").split(":")
            stalled.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            stalled.sendall((head + body).encode())
            wait_until(lambda: served.llm.num_open_requests == 4, "it is open")
            wait_until(served.is_idle, "the engine has done its part")
            assert served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
    assert "error='cut_off'" in caplog.text
    assert "Traceback" not in caplog.text


def _with_small_buffer(host: str, port: int) -> socket.socket:
    listening = bound_socket(host, port)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening


def _text(event: str) -> str:
    return str(json.loads(event)["choices"][0]["text"])
