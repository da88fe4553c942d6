"""/v1/completions, through OpenAI's own client: each answer is the offline LLM's, whole or streamed."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.serving import MODEL, Served

PROMPT = "Once upon a time, the king said:"


def test_equals_offline(llm: LLM, served: Served) -> None:
    params = SamplingParams(seed=7, max_tokens=40, top_p=0.9, presence_penalty=0.5, logit_bias={70: -5.0})
    answer = served.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=7,
        max_tokens=40,
        top_p=0.9,
        presence_penalty=0.5,
        logit_bias={"70": -5},
    )
    expected = offline(llm, served, [PROMPT], params)[0]
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    assert [choice.text for choice in answer.choices] == [expected.outputs[0].text]
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_offline(llm: LLM, served: Served) -> None:
    options: dict[str, Any] = {"seed": 11, "max_tokens": 60, "temperature": 0.8}
    chunks = list(
        served.client.completions.create(
            model=MODEL, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    expected = offline(llm, served, [PROMPT], SamplingParams(**options))[0].outputs[0]
    *parts, last = chunks
    assert len(parts) > 5, "it came at once"
    assert "".join(chunk.choices[0].text for chunk in parts) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_events_as_they_are(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert "content-length" not in answer.headers
        lines = list(answer.iter_lines())
    assert lines[1::2] == [""] * (len(lines) // 2)
    assert all(line.startswith("data: ") for line in lines[::2])
    found = [line.removeprefix("data: ") for line in lines[::2]]
    assert found[-1] == "[DONE]"
    assert all("usage" not in event for event in found)
    with served.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}) as events:
        *parts, _, _ = events
    assert all('"usage":null' in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_and_choices(llm: LLM, served: Served, stream: bool) -> None:
    prompts = ["The first.", "And the second one", "3"]
    texts = _texts(served, stream, prompt=prompts, n=2, seed=3, max_tokens=20)
    expected = offline(llm, served, prompts, SamplingParams(n=2, seed=3, max_tokens=20))
    assert texts == [item.text for output in expected for item in output.outputs]
    assert texts[0] != texts[1], "choices of one prompt draw differently"


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8], [[5, 6, 7, 8], [9, 10]]], ids=["ids", "lists"])
def test_token_ids(llm: LLM, served: Served, prompt: Any) -> None:
    answer = served.client.completions.create(model=MODEL, prompt=prompt, seed=1, max_tokens=8)
    batch = prompt if isinstance(prompt[0], list) else [prompt]
    expected = offline(llm, served, batch, SamplingParams(seed=1, max_tokens=8))
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say it.", [70, 71, 72]], ids=["text", "ids"])
def test_echo(llm: LLM, served: Served, stream: bool, prompt: Any) -> None:
    plain = _texts(served, stream, prompt=prompt, seed=2, max_tokens=9, n=2)
    echoed = _texts(served, stream, prompt=prompt, seed=2, max_tokens=9, n=2, echo=True)
    text = prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)
    assert echoed == [text + each for each in plain]


def test_stop_strings(served: Served) -> None:
    full = _texts(served, False, prompt=PROMPT, seed=4, max_tokens=60)[0]
    stop = full[20:23]
    answer = served.client.completions.create(model=MODEL, prompt=PROMPT, seed=4, max_tokens=60, stop=[stop, "zzzz"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == full[: full.index(stop)]
    assert _texts(served, True, prompt=PROMPT, seed=4, max_tokens=60, stop=stop) == [full[: full.index(stop)]]


def test_16_tokens_unless_said(served: Served) -> None:
    answer = served.client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_fields_of_vllm(llm: LLM, served: Served) -> None:
    extra = {
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
        "ignore_eos": True,
        "stop_token_ids": [99],
        "bad_words": ["the"],
        "num_draft_tokens": 2,
        "acceptance": "rejection",
    }
    answer = served.client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=30, extra_body=extra)
    expected = offline(llm, served, [PROMPT], SamplingParams(seed=5, max_tokens=30, **extra))[0]  # type: ignore[arg-type]
    assert answer.choices[0].text == expected.outputs[0].text


def test_details_tell_of_speculation(llm: LLM, served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "magicdec_details": True}
    params = SamplingParams(max_tokens=30, temperature=0)
    whole = served.post("/v1/completions", body).json()["choices"][0]["magicdec"]
    with served.stream("/v1/completions", body) as events:
        parts = [json.loads(event)["magicdec"] for event in events if event != "[DONE]"]
    expected = offline(llm, served, [PROMPT], params)[0].outputs[0]
    for name, value in (("token_origins", expected.token_origins), ("token_lengths", expected.token_lengths)):
        assert whole[name] == value
        assert [each for part in parts for each in part[name]] == value
    assert parts[-1]["metrics"]["num_accepted_tokens"] == whole["metrics"]["num_accepted_tokens"] > 0
    assert whole["metrics"]["acceptance_length"] > 1


def test_concurrent_streams(llm: LLM, served: Served) -> None:
    """More than the batch holds, of different lengths; each as if it were alone."""
    jobs: list[dict[str, Any]] = [
        {"prompt": f"{PROMPT} {i}" * (i % 3 + 1), "seed": i, "max_tokens": 10 + 5 * i} for i in range(16)
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: _texts(served, True, **job)[0], jobs))
    params = [SamplingParams(seed=job["seed"], max_tokens=job["max_tokens"]) for job in jobs]
    expected = offline(llm, served, [job["prompt"] for job in jobs], params)
    assert found == [output.outputs[0].text for output in expected]
    assert served.is_idle()


_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.7, 1.0]),
    "max_tokens": st.integers(1, 25),
    "stop": st.lists(st.sampled_from(["t", "th", "he ", "e", "\ufffd", "q%"]), min_size=1, max_size=3),
    "min_tokens": st.integers(0, 1),
    "logprobs": st.integers(0, 3),
    "top_k": st.integers(1, 9),
    "num_draft_tokens": st.integers(0, 8),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
}


@settings(max_examples=40)
@given(
    prompt=st.one_of(
        st.text(min_size=1, max_size=9), st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3)
    ),
    options=st.fixed_dictionaries({"seed": st.integers(0, 99)}, optional=_OPTIONS),
)
def test_any_request(llm: LLM, shared: Served, prompt: Any, options: dict[str, Any]) -> None:
    """Whole and streamed: one answer, and the offline one."""
    if "logprobs" in options:
        options.pop("echo", None)
    body = {"prompt": prompt, **options}
    whole = shared.post("/v1/completions", body).json()["choices"]
    with shared.stream("/v1/completions", body) as events:
        parts = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    echo = options.pop("echo", False)
    outputs = offline(llm, shared, prompt, SamplingParams(**options))
    expected = [(output.prompt, item) for output in outputs for item in output.outputs]
    assert len(whole) == len(expected)
    for index, (choice, (text, item)) in enumerate(zip(whole, expected, strict=True)):
        mine = [part for part in parts if part["index"] == index]
        assert choice["text"] == "".join(part["text"] for part in mine) == (text if echo else "") + item.text
        assert choice["finish_reason"] == mine[-1]["finish_reason"] == item.finish_reason
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [each for part in mine for each in part["logprobs"][name]] == values


def offline(llm: LLM, served: Served, prompts: Any, params: Any) -> Any:
    """The same from `LLM.generate`, whose engine the server's thread leaves alone while it has no request."""
    assert served.llm.num_open_requests == 0
    return llm.generate(prompts, params)


def _texts(served: Served, stream: bool, **options: Any) -> list[str]:
    """Of each choice."""
    if not stream:
        answer = served.client.completions.create(model=MODEL, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]
    texts: dict[int, str] = {}
    for chunk in served.client.completions.create(model=MODEL, stream=True, **options):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    return [texts[index] for index in sorted(texts)]
