"""Bad input gets a clear error; the process lives, and other requests are unharmed."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from magicdec.errors import EngineError, MagicDecError, RequestError
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.conftest import PairFactory


@pytest.fixture(scope="module")
def llm(pair: PairFactory) -> LLM:
    return LLM(pair("self"), dtype="float64", kv_cache_tokens=512)


BAD: dict[str, tuple[Callable[[], Any], list[int] | str, str]] = {
    "empty prompt": (SamplingParams, [], "empty"),
    "empty text": (SamplingParams, "", "empty"),
    "too long": (SamplingParams, [5] * 1024, "max_seq_len=1024"),
    "never fits": (lambda: SamplingParams(max_tokens=100), [5] * 450, "holds 512"),
    "unknown id": (SamplingParams, [5, 128], "128"),
    "negative id": (SamplingParams, [5, -1], "-1"),
    "NaN temperature": (lambda: SamplingParams(temperature=math.nan), [5], "temperature"),
    "negative top_p": (lambda: SamplingParams(top_p=-0.1), [5], "top_p"),
    "stop id outside": (lambda: SamplingParams(stop_token_ids=[999]), [5], "999"),
    "bias outside": (lambda: SamplingParams(logit_bias={500: 1.0}), [5], "500"),
    "drafts too long": (lambda: SamplingParams(num_draft_tokens=9), [5], "max_draft_len=8"),
    "beam search": (lambda: SamplingParams(use_beam_search=True), [5], "use_beam_search"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_the_value_and_others_unharmed(llm: LLM, name: str) -> None:
    make, prompt, value = BAD[name]
    fine = SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate([[5, 6, 7]], fine)
    llm.engine.add_request("good", [5, 6, 7], fine)
    llm.engine.step()
    with pytest.raises(RequestError, match=value):
        llm.generate([prompt], make())
    final = None
    while llm.engine.has_unfinished_requests:
        final = llm.engine.step()[0]
    assert final is not None
    assert final.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.engine.check_integrity()


def test_one_bad_prompt_in_a_batch_starts_none(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.generate([[5], []], SamplingParams())
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 sampling_params for 2 prompts"):
        llm.generate([[5], [6]], [SamplingParams()] * 3)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"max_seq_len": 4096}, "max_seq_len=4096"),
        ({"num_draft_tokens": 99}, "99"),
        ({"window_size": 30}, "30"),
        ({"dtype": "int3"}, "int3"),
        ({"kv_cache_tokens": 3}, "kv_cache_tokens=3"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 64, "max_num_tokens": 10}, "max_num_tokens"),
    ],
)
def test_options_that_do_not_fit_are_named(pair: PairFactory, options: dict[str, Any], value: str) -> None:
    with pytest.raises(MagicDecError, match=value):
        LLM(pair("self"), **options)


def test_the_window_of_a_separate_draft_is_built_in(pair: PairFactory) -> None:
    with pytest.raises(EngineError, match="window_size=64"):
        LLM(pair("in_cache"), window_size=64)


def test_an_unfinished_stream_frees_everything_when_closed(llm: LLM) -> None:
    stream = llm.generate_stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.engine.has_unfinished_requests
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()
