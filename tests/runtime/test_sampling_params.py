"""Sampling parameters: what is out of range, misspelt or not supported is refused with the value and the mend."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest

from magicdec.errors import RequestError
from magicdec.runtime import sampling_params
from magicdec.runtime.sampling_params import SamplingParams


def refusal(**options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, x) for name in ("temperature", "top_p", "min_p") for x in (math.nan, math.inf, -0.1, "1", None)),
        *((name, math.nan) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        ("temperature", 2e6),
        ("temperature", True),
        ("temperature", 1e-9),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", 3),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["2"]),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("ignore_eos", 1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("acceptance", "typical"),
        ("num_draft_tokens", -1),
    ],
)
def test_refusal_names_field_value_and_mend(field: str, value: object) -> None:
    text = refusal(**{field: value})
    shown = value[-1] if isinstance(value, list) else value
    assert field in text
    assert repr(shown) in text
    assert " give " in text
    assert "\n" not in text


def test_every_field_has_its_mend() -> None:
    assert set(SamplingParams.model_fields) == set(sampling_params._MENDS)
    assert not set(SamplingParams.model_fields) & set(sampling_params._UNSUPPORTED)


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf, 1e10])
def test_bias_must_be_finite(bias: float) -> None:
    text = refusal(logit_bias={3: bias})
    assert "logit_bias[3]" in text
    assert repr(bias) in text


def test_bias_of_a_negative_id() -> None:
    assert "logit_bias[-3] is -3" in refusal(logit_bias={-3: 1.0})


def test_min_tokens_above_max_tokens() -> None:
    assert refusal(min_tokens=20) == "min_tokens is 20, above max_tokens (16)"
    assert SamplingParams(min_tokens=16).min_tokens == 16


@pytest.mark.parametrize(
    "name", ["use_beam_search", "best_of", "guided_decoding", "prompt_logprobs", "logits_processors", "length_penalty"]
)
def test_what_other_engines_know_is_refused_by_name(name: str) -> None:
    text = refusal(**{name: 2})
    assert text.startswith(f"sampling parameter {name} (given 2) is not supported: ")


def test_misspelt_name() -> None:
    assert refusal(temprature=0.5) == "sampling parameter temprature (given 0.5) is unknown: check the spelling"


def test_several_faults_are_counted() -> None:
    assert refusal(n=0, max_tokens=0, top_k=-5).endswith("(and 2 more)")


def test_a_refusal_is_a_value_error_and_hides_the_library() -> None:
    with pytest.raises(ValueError, match="temperature") as caught:
        SamplingParams(temperature=-1.0)
    assert caught.value.__cause__ is None
    assert "pydantic" not in str(caught.value)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens, params.n) == (1.0, 0, 1.0, 16, 1)
    assert (params.stop, params.bad_words, params.stop_token_ids, params.logit_bias) == ([], [], [], None)


def test_handy_forms_are_taken() -> None:
    handy: Any = {"stop": "###", "bad_words": ("a", "b"), "stop_token_ids": None, "logit_bias": {"7": 1, 9: -2.5}}
    params = SamplingParams(**handy)
    assert params.stop == ["###"]
    assert params.bad_words == ["a", "b"]
    assert params.stop_token_ids == []
    assert params.logit_bias == {7: 1.0, 9: -2.5}
    assert SamplingParams(temperature=1).temperature == 1.0
    assert SamplingParams(top_k=-1).top_k == -1
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_acceptance_rule_follows_the_seed() -> None:
    assert SamplingParams().acceptance_rule == "rejection"
    assert SamplingParams(seed=0).acceptance_rule == "coupled"
    assert SamplingParams(seed=0, acceptance="rejection").acceptance_rule == "rejection"
    assert SamplingParams(acceptance="coupled").acceptance_rule == "coupled"


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.1).greedy


def test_model_validate_raises_the_same_errors() -> None:
    assert SamplingParams.model_validate({"top_k": 5}) == SamplingParams(top_k=5)
    params = SamplingParams(seed=4)
    assert SamplingParams.model_validate(params) is params
    with pytest.raises(RequestError, match=r"top_p is 2\.0"):
        SamplingParams.model_validate({"top_p": 2.0})
    with pytest.raises(RequestError, match="give a mapping"):
        SamplingParams.model_validate([1])


def test_round_trips() -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.5}, seed=9, acceptance="rejection")
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams(**json.loads(params.model_dump_json())) == params
