"""What a server does not let in: strangers, large bodies, long prompts, too many at once, and what takes too long."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.service import Limits
from tests.runtime.openai.serving import MODEL, SECONDS, Served, held, serving, slowed, wait_until

BODY = {"prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked(llm: LLM) -> Iterator[Served]:
    """With two keys."""
    with serving(llm, api_keys=["first", "zw\u00f6lf"]) as running:
        yield running


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer firs"])
def test_without_the_key(locked: Served, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for answer in (
        locked.http.get("/v1/models", headers=headers),
        locked.http.post("/v1/completions", json=BODY, headers=headers),
        locked.http.post("/v1/nothing", json=BODY, headers=headers),
    ):
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["x-request-id"]
    assert locked.llm.num_open_requests == 0


def test_with_the_key(locked: Served) -> None:
    assert [model.id for model in locked.client.models.list()] == [MODEL]
    for key in (b"first", "zw\u00f6lf".encode()):
        assert locked.http.get("/v1/models", headers={b"Authorization": b"Bearer " + key}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_probes_need_no_key(locked: Served, path: str) -> None:
    assert locked.http.get(path).status_code == 200


def test_body_and_prompt(llm: LLM) -> None:
    with serving(llm, limits=Limits(max_body_bytes=3000, max_prompt_tokens=50)) as served:
        answer = served.post("/v1/completions", {**BODY, "user": "x" * 4000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert "3000" in answer.json()["error"]["message"]
        parts = (b" " * 1000 for _ in range(5000))  # 5 MB, of a length that is not told
        assert served.http.post("/v1/completions", content=parts).status_code == 413
        answer = served.post("/v1/completions", {**BODY, "prompt": [5] * 51})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "prompt"
        assert served.post("/v1/completions", {**BODY, "prompt": [5] * 50}).status_code == 200


def test_a_client_that_goes_while_it_sends(llm: LLM) -> None:
    with serving(llm) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert served.post("/v1/completions", BODY).status_code == 200


def test_queue(llm: LLM) -> None:
    """Full is 429 and says when to try again; of a call that does not fit as a whole, nothing stays."""
    with serving(llm, max_queue_size=3) as served:
        with held(llm) as gate:
            long = {**BODY, "max_tokens": 100, "ignore_eos": True}
            answers = [served.later("/v1/completions", long) for _ in range(2)]
            wait_until(lambda: served.llm.num_open_requests == 2, "two are open")
            answer = served.post("/v1/completions", {**long, "prompt": ["a", "b"]})
            assert answer.status_code == 429
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["type"] == "rate_limit_error"
            gate.release(3)
            wait_until(lambda: served.llm.num_open_requests == 2, "the prompt that did fit is taken back")
        assert [each.result(SECONDS).status_code for each in answers] == [200, 200]
        assert served.post("/v1/completions", {**BODY, "prompt": ["a", "b", "c"]}).status_code == 200
        with pytest.raises(openai.RateLimitError):
            served.client.completions.create(model=MODEL, prompt=["a"] * 4)


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"]], ids=["one", "two"])
def test_time_is_over(llm: LLM, prompt: Any) -> None:
    """504 where nothing was sent, an event where something was."""
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "num_draft_tokens": 0}
    with serving(llm, limits=Limits(request_timeout=0.4)) as served, slowed(llm, 0.02):
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "request_timeout"
        assert "0.4 s" in answer.json()["error"]["message"]
        with served.stream("/v1/completions", body) as events:
            *texts, failure, done = events
        assert texts
        assert json.loads(failure)["error"]["type"] == "timeout_error"
        assert done == "[DONE]"
        with pytest.raises(openai.APIError, match="time limit"):
            list(
                served.client.completions.create(
                    model=MODEL, stream=True, prompt=prompt, max_tokens=1500, extra_body={"ignore_eos": True}
                )
            )
        wait_until(served.is_idle, "nothing is left of them")
        assert served.post("/v1/completions", BODY).status_code == 200


def test_time_is_over_before_the_first_token(llm: LLM) -> None:
    """Then a stream has its code as well. The prompt is new, and read in three steps."""
    body = {"prompt": [7, 8, 9] * 100, "stream": True}
    with serving(llm, limits=Limits(request_timeout=0.1)) as served, slowed(llm, 0.2):
        assert served.post("/v1/completions", body).status_code == 504
