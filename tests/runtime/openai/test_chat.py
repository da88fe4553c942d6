"""/v1/chat/completions, through OpenAI's own client: the tokenizer's chat template, and the offline LLM's answer."""

from typing import Any

import pytest
from openai import BadRequestError

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.serving import MODEL, Served, serving

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the king's name?"},
]


@pytest.mark.parametrize("tokens", ["max_tokens", "max_completion_tokens"])
def test_equals_offline(llm: LLM, served: Served, tokens: str) -> None:
    limit: Any = {tokens: 25}
    answer = served.client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=7, n=2, **limit)
    expected = llm.generate(llm.chat_prompt(MESSAGES), SamplingParams(seed=7, n=2, max_tokens=25))[0]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in answer.choices] == [item.text for item in expected.outputs]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert [choice.finish_reason for choice in answer.choices] == [item.finish_reason for item in expected.outputs]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(item.token_ids) for item in expected.outputs)


def test_stream_equals_offline(llm: LLM, served: Served) -> None:
    chunks = list(
        served.client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=8,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    expected = llm.generate(llm.chat_prompt(MESSAGES), SamplingParams(seed=8, max_tokens=40))[0].outputs[0]
    *parts, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.choices[0].delta.role for chunk in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == expected.text
    assert parts[-1].choices[0].finish_reason == expected.finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(expected.token_ids)


def test_streaming_helper(served: Served) -> None:
    """The client's own accumulator finds the answer that comes whole."""
    options: Any = {"model": MODEL, "messages": MESSAGES, "seed": 9, "max_completion_tokens": 30, "logprobs": True}
    text = served.client.chat.completions.create(**options).choices[0].message.content
    options["stop"] = text[15:17]  # the helper takes no answer that reached its length
    with served.client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    whole = served.client.chat.completions.create(**options)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert streamed.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_parts_and_developer(served: Served) -> None:
    """Parts are their text, the developer is who the system was, and null fields of an earlier answer are none."""
    turns: list[Any] = [*MESSAGES, {"role": "assistant", "content": "Otto."}, {"role": "user", "content": "Why?"}]
    spelled: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        MESSAGES[1],
        {"role": "assistant", "content": "Otto.", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Why?"},
    ]
    first, second = (
        served.client.chat.completions.create(model=MODEL, messages=each, seed=1, max_tokens=20)
        for each in (turns, spelled)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.here }}", "undefined"),
        ("", "plain text"),
    ],
)
def test_a_template_that_refuses(
    llm: LLM, served: Served, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(llm.tokenizer._tokenizer, "chat_template", template)
    with pytest.raises(BadRequestError, match=said):
        served.client.chat.completions.create(model=MODEL, messages=MESSAGES)


def test_fills_the_context_unless_said(pair: str) -> None:
    """Without a limit the answer may be as long as there is room."""
    extra = {"ignore_eos": True, "num_draft_tokens": 8}
    with serving(LLM(pair, max_seq_len=192)) as served:
        answer = served.client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, extra_body=extra)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 192
