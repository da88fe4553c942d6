"""A client that goes frees what its request holds, within a step."""

import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.generation import Generation
from tests.runtime.openai.serving import SECONDS, Served, held, serving, wait_until

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when the server has noticed that a client went."""
    event, leave = threading.Event(), Generation.leave

    def told(self: Generation) -> None:
        leave(self)
        event.set()

    monkeypatch.setattr(Generation, "leave", told)
    return event  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "n": 3}),
        ("/v1/completions", {**LONG, "prompt": ["a", "b", "c", "d", "e", "f"]}),
        ("/v1/chat/completions", CHAT),
    ],
    ids=["one", "choices", "prompts", "chat"],
)
def test_in_a_stream(llm: LLM, left: threading.Event, path: str, body: dict[str, Any]) -> None:
    with serving(llm) as served, held(llm) as gate:
        gate.release(8)
        with served.stream(path, body) as events:
            for _ in range(2):
                assert '"error"' not in next(events)
            assert served.num_used_blocks > 0
        _freed_in_a_step(served, left, gate)


@pytest.mark.parametrize("stream", [False, True])
def test_before_any_token(llm: LLM, left: threading.Event, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    """While it waits, also for an answer that comes whole."""
    caplog.set_level(logging.INFO)
    with serving(llm) as served, held(llm) as gate:
        host, port = served.url.removeprefix("http://").split(":")
        body = b'{"prompt": "hi", "max_tokens": 1500, "ignore_eos": true, "stream": %s}' % str(stream).lower().encode()
        with socket.create_connection((host, int(port))) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: gone\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            wait_until(lambda: served.llm.num_open_requests == 1, "it is open")
        _freed_in_a_step(served, left, gate)
        wait_until(lambda: "error='client_left'" in caplog.text, "the log tells")
    assert "gone POST /v1/completions" in caplog.text
    assert "Traceback" not in caplog.text


def test_neighbours_go_on(llm: LLM) -> None:
    """Of eight streams that share steps every second is left; the others are whole, and no block stays."""
    with serving(llm) as served:
        whole = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True}
        expected = served.post("/v1/completions", {**whole, "seed": 1}).json()["choices"][0]["text"]
        answers = []
        for index in range(8):
            if index % 2:
                answers.append(served.later("/v1/completions", {**whole, "seed": 1}))
            else:
                with served.stream("/v1/completions", {**LONG, "seed": index}) as events:
                    next(events)
        assert [each.result(SECONDS).json()["choices"][0]["text"] for each in answers] == [expected] * 4
        wait_until(served.is_idle, "no block stays")


def _freed_in_a_step(served: Served, left: threading.Event, gate: threading.Semaphore) -> None:
    """The step that runs when the client goes is the last: it ends, and all is free."""
    assert left.wait(SECONDS)
    while gate.acquire(blocking=False):  # those that were allowed for and not made
        pass
    gate.release()
    wait_until(served.is_idle, "freed within a step")
