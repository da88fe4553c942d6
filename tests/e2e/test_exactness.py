"""Speculation changes nothing: a tiny random LLaMA in float64, token for token against plain decoding."""

import random
from pathlib import Path

import pytest
import torch

from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.conftest import PairFactory
from tests.support.engines import DRAFTERS, Drafter

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 128) for _ in range(length)] for length in (1, 5, 33, 150, 70, 16)]
# Sampling that covers every transformation, and greedy; seeds make the coupled rule the default.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=70, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=90),
    SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9, max_tokens=64, ignore_eos=True, logprobs=2),
    SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, max_tokens=100, min_tokens=30),
    SamplingParams(seed=4, presence_penalty=0.5, frequency_penalty=0.3, max_tokens=80, stop=["th", "an"]),
    SamplingParams(seed=5, logit_bias={7: 2.0, 9: -3.0}, bad_words=["the", "q"], max_tokens=80, stop_token_ids=[40]),
]
_PLAIN: dict[Path, list[RequestOutput]] = {}


def plain(engine_dir: Path) -> list[RequestOutput]:
    """Each request alone, draft length 0, in one chunk."""
    if engine_dir not in _PLAIN:
        llm = LLM(engine_dir, dtype="float64", num_draft_tokens=0, max_batch_size=1, max_num_tokens=1024)
        _PLAIN[engine_dir] = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    return _PLAIN[engine_dir]


def run(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    return outputs


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for out, ref in zip(outputs, expected, strict=True):
        mine, plains = out.outputs[0], ref.outputs[0]
        assert mine.token_ids == plains.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            plains.text,
            plains.finish_reason,
            plains.stop_reason,
        )
        if plains.logprobs is not None:
            assert mine.logprobs is not None
            for row, ref_row in zip(mine.logprobs, plains.logprobs, strict=True):
                assert list(row) == list(ref_row)
                assert [p.logprob for p in row.values()] == pytest.approx([p.logprob for p in ref_row.values()])


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(out.metrics.num_accepted_tokens for out in outputs)


@pytest.mark.parametrize("length", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_is_that_of_plain_decoding(pair: PairFactory, drafter: Drafter, length: int) -> None:
    llm = LLM(pair(drafter), dtype="float64", num_draft_tokens=length, max_batch_size=4)
    outputs = run(llm)
    assert_same(outputs, plain(pair(drafter)))
    if drafter != "ngram":
        assert accepted(outputs) > 50, "the drafts must matter for this test to mean anything"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_forced_preemption_and_small_chunks_change_nothing(pair: PairFactory, drafter: Drafter) -> None:
    llm = LLM(pair(drafter), dtype="float64", num_draft_tokens=3, kv_cache_tokens=256, max_num_tokens=17)
    outputs = run(llm)
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    assert_same(outputs, plain(pair(drafter)))


@pytest.mark.parametrize("drafter", ["self", "in_cache"])
def test_greedy_under_the_rejection_rule_is_plain_decoding(pair: PairFactory, drafter: Drafter) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, acceptance="rejection", logprobs=0)
    llm = LLM(pair(drafter), dtype="float64", num_draft_tokens=4)
    speculative = llm.generate(PROMPTS, params)
    reference = llm.generate(PROMPTS, params.model_copy(update={"num_draft_tokens": 0}))
    assert_same(speculative, reference)
    assert accepted(speculative) > 50
    assert accepted(reference) == 0


def test_a_seed_means_the_same_with_any_neighbours(pair: PairFactory) -> None:
    llm = LLM(pair("self"), dtype="float64", num_draft_tokens=4)
    params = SamplingParams(seed=9, acceptance="rejection", max_tokens=40, ignore_eos=True)
    (alone,) = llm.generate([PROMPTS[2]], params)
    crowd = llm.generate(PROMPTS[2:5], [params, *PARAMS[3:5]])
    assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_unseeded_requests_do_not_share_a_stream(pair: PairFactory) -> None:
    llm = LLM(pair("self"), num_draft_tokens=2)
    outputs = llm.generate([PROMPTS[1]] * 4, SamplingParams(max_tokens=20, ignore_eos=True, n=2))
    texts = {tuple(completion.token_ids) for out in outputs for completion in out.outputs}
    assert len(texts) == 8


def test_float32_runs_by_default_and_a_stream_ends_as_generate_does(pair: PairFactory) -> None:
    llm = LLM(pair("in_cache"))
    assert llm.runner.dtype == torch.float32
    steps = list(llm.generate_stream(PROMPTS[3], PARAMS[2]))
    (whole,) = llm.generate([PROMPTS[3]], PARAMS[2])
    assert steps[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    lengths = [len(step.outputs[0].token_ids) for step in steps]
    assert lengths == sorted(set(lengths)), "a stream only grows"
    assert steps[-1].finished
    assert not any(step.finished for step in steps[:-1])
