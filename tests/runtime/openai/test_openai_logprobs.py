"""Log-probabilities in the shapes of both endpoints: those of the offline LLM, for the tokens that made the text."""

import itertools
from typing import Any

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import CompletionOutput
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.serving import MODEL, Served
from tests.support.tiny_models import SPECIAL_TOKENS

PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


def test_completion(llm: LLM, served: Served) -> None:
    answer = served.client.completions.create(model=MODEL, prompt=PROMPT, seed=2, max_tokens=30, logprobs=3)
    expected = _offline(llm, PROMPT, 3)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert [len(top) for top in found.top_logprobs] == [len(row) for row in expected.logprobs or []]
    assert found.token_logprobs == pytest.approx(_chosen(expected))
    for token, top, value in zip(found.tokens, found.top_logprobs, found.token_logprobs or [], strict=True):
        assert top[token] == value
    assert found.text_offset == [0, *itertools.accumulate(expected.token_lengths[:-1])]
    text = answer.choices[0].text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith(("bytes:", "<")) and "\ufffd" not in text[offset : offset + len(token) + 1]:
            assert text[offset:].startswith(token)


def test_completion_stream_is_the_same(served: Served) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "seed": 2, "max_tokens": 30, "logprobs": 3, "stop": "\x7f"}
    whole = served.client.completions.create(**options).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in served.client.completions.create(**options, stream=True)]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(whole, name)


@pytest.mark.parametrize("num_top", [None, 0, 4])
def test_chat(llm: LLM, served: Served, num_top: int | None) -> None:
    answer = served.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=2, max_tokens=30, logprobs=True, top_logprobs=num_top
    )
    expected = _offline(llm, llm.chat_prompt(MESSAGES), num_top or 0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [entry.logprob for entry in found.content] == pytest.approx(_chosen(expected))
    assert [len(entry.top_logprobs) for entry in found.content] == [num_top or 0] * len(expected.token_ids)
    for entry in found.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert not values or entry.logprob <= values[0]
    spelled = b"".join(bytes(entry.bytes or []) for entry in found.content if entry.token not in SPECIAL_TOKENS)
    clean = answer.choices[0].message.content or ""
    assert spelled.decode(errors="ignore").replace("\ufffd", "") == clean.replace("\ufffd", "")


def test_none_unless_asked(served: Served) -> None:
    assert served.client.completions.create(model=MODEL, prompt=PROMPT).choices[0].logprobs is None
    chat = served.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert chat.choices[0].logprobs is None


def _offline(llm: LLM, prompt: Any, num_logprobs: int) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(seed=2, max_tokens=30, logprobs=num_logprobs))[0].outputs[0]


def _chosen(output: CompletionOutput) -> list[float]:
    return [row[token_id].logprob for row, token_id in zip(output.logprobs or [], output.token_ids, strict=True)]
