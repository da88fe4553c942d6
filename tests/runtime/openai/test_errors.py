"""What is wrong is answered in OpenAI's shape, by name and with the mend, and leaves the server serving."""

import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import RequestError
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.openai.answers.pieces import PieceReader
from magicdec.runtime.openai.requests.unsupported import UNSUPPORTED
from tests.runtime.openai.serving import MODEL, Served, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> dict[str, Any]:
    """A body that is well but for these fields."""
    return {"model": MODEL, "prompt": "hi", "max_tokens": 2, **fields}


def conversation(**fields: Any) -> dict[str, Any]:
    """The same of a conversation."""
    return {"model": MODEL, "messages": USER, "max_tokens": 2, **fields}


COMPLETION_MISTAKES = [
    ("prompt", {"prompt": ""}, "empty"),
    ("prompt", {"prompt": []}, "list of strings"),
    ("prompt", {"prompt": ["hi", 5]}, "list of strings"),
    ("prompt", {"prompt": [[5], []]}, "list of strings"),
    ("prompt", {"prompt": [True]}, "list of strings"),
    ("prompt", {"prompt": None}, "missing"),
    ("prompt", {"prompt": [5, -1]}, "-1"),
    ("prompt", {"prompt": [5, 10**6]}, "1000000"),
    ("prompt", {"prompt": "hi " * 4000}, "at most"),
    ("temperature", {"temperature": -1}, "0 for greedy"),
    ("temperature", {"temperature": "hot"}, "0 for greedy"),
    ("max_tokens", {"max_tokens": 0}, "1 or more"),
    ("max_tokens", {"max_tokens": 2.5}, "1 or more"),
    ("n", {"n": 0}, "1 or more"),
    ("n", {"n": 1000}, "at most 128"),
    ("n", {"n": 2, "prompt": ["hi"] * 65}, "at most 128"),
    ("logprobs", {"logprobs": 21}, "20"),
    ("logprobs", {"logprobs": True}, "integer"),
    ("echo", {"echo": True, "logprobs": 1}, "output tokens"),
    ("echo", {"echo": "yes"}, "true or false"),
    ("stop", {"stop": ""}, "none of them empty"),
    ("stop", {"stop": ["a"] * 65}, "at most 64"),
    ("stop_token_ids", {"stop_token_ids": [1] * 257}, "at most 256"),
    ("bad_words", {"bad_words": ["a"] * 257}, "at most 256"),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(4097)}}, "at most 4096"),
    ("seed", {"seed": -5}, "2**64"),
    ("seed", {"seed": 2**70}, "2**64"),
    ("logit_bias", {"logit_bias": {"the": 5}}, "token ids"),
    ("logit_bias", {"logit_bias": {"99999": 5}}, "99999"),
    ("num_draft_tokens", {"num_draft_tokens": 99}, "max_draft_len"),
    ("acceptance", {"acceptance": "typical"}, "coupled"),
    ("stream", {"stream": "yes"}, "true or false"),
    ("stream_options", {"stream_options": {"include_usage": True}}, "stream: true"),
    ("stream_options", {"stream": True, "stream_options": {"usage": True}}, "include_usage"),
    ("max_completion_tokens", {"max_completion_tokens": 3}, "one of them"),
    ("temprature", {"temprature": 1}, "spelling"),
    ("messages", {"messages": USER}, "spelling"),
    ("beam_width", {"beam_width": 2}, "use n"),
    ("sampling", {"sampling": {}}, "spelling"),
    ("best_of", {"best_of": True}, "use n"),
]
CHAT_MISTAKES = [
    ("messages", {"messages": None}, "missing"),
    ("messages", {"messages": []}, "at least one"),
    ("messages", {"messages": "hi"}, "at least one"),
    ("messages[0]", {"messages": ["hi"]}, "role"),
    ("messages[0].role", {"messages": [{"role": "king", "content": "hi"}]}, "assistant"),
    ("messages[0].content", {"messages": [{"role": "user"}]}, "missing"),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}, "string"),
    ("messages[0].name", {"messages": [{"role": "user", "content": "hi", "name": "Otto"}]}, "content"),
    ("messages[1].tool_calls", {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "content"),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ("top_logprobs", {"top_logprobs": 2}, "logprobs: true"),
    ("logprobs", {"logprobs": 3}, "boolean"),
    ("tools", {"tools": [{"type": "function"}]}, "not supported"),
    ("response_format", {"response_format": {"type": "json_object"}}, "not supported"),
    ("echo", {"echo": True}, "spelling"),
]


@pytest.mark.parametrize(("param", "fields", "mend"), COMPLETION_MISTAKES)
def test_completion_mistakes(shared: Served, param: str, fields: dict[str, Any], mend: str) -> None:
    _names(shared, COMPLETIONS, completion(**fields), param, mend)


@pytest.mark.parametrize(("param", "fields", "mend"), CHAT_MISTAKES)
def test_chat_mistakes(shared: Served, param: str, fields: dict[str, Any], mend: str) -> None:
    _names(shared, CHAT, conversation(**fields), param, mend)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields(shared: Served, name: str) -> None:
    """Refused by name with what to do instead, and accepted where they ask for nothing."""
    refusal = UNSUPPORTED[name]
    error = _names(shared, CHAT, conversation(**{name: "a value"}), name, refusal.mend)
    assert error["code"] == "unsupported_parameter"
    for value in (None, *refusal.neutral):
        assert shared.post(CHAT, conversation(**{name: value})).status_code == 200


def test_what_other_clients_always_send(shared: Served) -> None:
    """Fields at the values that change nothing."""
    idle = {
        "best_of": 1,
        "chat_template_kwargs": {},
        "length_penalty": 1.0,
        "metadata": {},
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "skip_special_tokens": True,
        "store": False,
        "tool_choice": "none",
        "tools": [],
        "use_beam_search": False,
    }
    assert shared.post(CHAT, conversation(**idle)).status_code == 200
    assert shared.post(COMPLETIONS, completion(**idle, suffix=None)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"hi"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"top_p": NaN}',
        b"[" * 9999,
    ],
    ids=["empty", "cut", "list", "null", "string", "no UTF-8", "surrogate", "NaN", "deep"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_json(shared: Served, path: str, body: bytes) -> None:
    answer = shared.post(path, body)
    assert answer.status_code == 400
    assert "JSON" in _error(answer)["message"]


def test_a_number_that_python_would_not_print(shared: Served) -> None:
    for field in ("seed", "n", "prompt"):
        body = json.dumps(completion(**{field: ["BIG"] if field == "prompt" else "BIG"}))
        _refused(shared, COMPLETIONS, body.replace('"BIG"', "9" * 5000).encode())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ["prompt", "messages", "n", "seed", "stop", "logit_bias", "logprobs", "top_k", "bad_words", "user", "stream"]


@settings(max_examples=150)
@given(path=st.sampled_from([COMPLETIONS, CHAT]), fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3))
def test_any_json(shared: Served, path: str, fields: dict[str, Any]) -> None:
    """Served, or refused in the one shape."""
    base = completion() if path == COMPLETIONS else conversation()
    answer = shared.post(path, {**base, **fields})
    if answer.status_code != 200:
        assert answer.status_code == 400
        assert _error(answer)["type"] == "invalid_request_error"
    assert shared.is_idle()


def test_openai_client_raises_its_own_errors(shared: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        shared.client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="gpt-4") as absent:
        shared.client.chat.completions.create(model="gpt-4", messages=USER)
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        shared.client.models.retrieve("gpt-4")


def test_prompt_that_leaves_no_room(shared: Served) -> None:
    room = shared.llm.config.max_seq_len
    error = _names(shared, COMPLETIONS, completion(prompt=[5] * room), "prompt", f"at most {room - 1}")
    assert error["code"] == "context_length_exceeded"
    assert shared.post(COMPLETIONS, completion(prompt=[5] * (room - 1))).status_code == 200


def test_other_addresses_and_methods(shared: Served) -> None:
    absent = shared.http.get("/v2/anything")
    assert absent.status_code == 404
    assert _error(absent)["type"] == "not_found_error"
    wrong = shared.http.get(COMPLETIONS)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert _error(wrong)["code"] == "method_not_allowed"


def test_long_values_are_not_sent_back(shared: Served) -> None:
    answer = shared.post(COMPLETIONS, completion(acceptance="x" * 100_000))
    assert answer.status_code == 400
    assert len(answer.content) < 2000


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_finds_late(shared: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Its thread may refuse as well: before the first chunk, that is an answer with its own code."""

    def refuse(*_: object) -> None:
        raise RequestError("bad_words hold a word that no token spells; leave it out")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add", refuse)
        answer = shared.post(COMPLETIONS, completion(stream=stream, prompt=["hi", "you"]))
    assert answer.status_code == 400
    assert _error(answer)["param"] == "bad_words"
    assert shared.post(COMPLETIONS, completion()).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_mistake_in_a_stream_is_no_event(shared: Served, path: str) -> None:
    body = completion if path == COMPLETIONS else conversation
    _refused(shared, path, body(stream=True, top_p=5))


def test_a_bug_is_answered_and_logged(
    shared: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a code of its own, the request's id and no traceback; the log has that."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of all things")

    for target, name in ((shared.llm, "submit"), (PieceReader, "read")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            answer = shared.post(COMPLETIONS, completion(stream=True), **{"X-Request-Id": "mine"})
        assert answer.status_code == 500
        assert _error(answer)["code"] == "internal_error"
        assert "mine" in _error(answer)["message"]
        assert "of all things" not in answer.text
        assert "of all things" in caplog.text
        caplog.clear()
    assert shared.post(COMPLETIONS, completion()).status_code == 200
    wait_until(shared.is_idle, "the request that failed is aborted")


def _refused(served: Served, path: str, body: Any) -> dict[str, Any]:
    """400, and the next request is served."""
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    error = _error(answer)
    assert error["type"] == "invalid_request_error"
    assert served.is_idle()
    assert served.post(COMPLETIONS, completion()).status_code == 200
    return error


def _names(served: Served, path: str, body: Any, param: str, mend: str) -> dict[str, Any]:
    error = _refused(served, path, body)
    assert mend in error["message"]
    assert error["param"] == param
    return error


def _error(answer: httpx2.Response) -> dict[str, Any]:
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error
