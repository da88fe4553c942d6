"""The real model: SmolLM2-135M-Instruct in float32, on real text."""

import pydoc_data.topics
from pathlib import Path

import pytest

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.support.smollm2 import smollm2_engine, smollm2_pair

pytestmark = pytest.mark.usefixtures("all_threads")
TEXT = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    return smollm2_engine()


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> LLM:
    return LLM(engine_dir, num_draft_tokens=4)


@pytest.fixture(scope="module")
def tokens(llm: LLM) -> list[int]:
    return llm.tokenizer.encode(TEXT[:40_000])


def test_greedy_200_tokens_after_4k(llm: LLM, tokens: list[int]) -> None:
    """Self-speculation through a window of 512, against plain decoding of the same prompt."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (speculative,) = llm.generate([tokens[:4096]], params)
    (plain,) = llm.generate([tokens[:4096]], params.model_copy(update={"num_draft_tokens": 0}))
    assert speculative.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(plain.outputs[0].token_ids) == 200
    assert speculative.metrics.acceptance_length > 2


PROMPTS = ((100, 900), (5000, 5700), (0, 40))  # pieces of the text, two longer than the window of 256
PARAMS = [
    SamplingParams(seed=11, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=12, max_tokens=40, temperature=0.7, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=13, max_tokens=40, top_k=50, repetition_penalty=1.1, ignore_eos=True),
]


@pytest.fixture(scope="module")
def plain_ids(engine_dir: Path, tokens: list[int]) -> list[list[int]]:
    """Each request alone in an engine of its own, without drafts."""
    llm = LLM(engine_dir, num_draft_tokens=0, max_batch_size=1)
    return [
        llm.generate([tokens[slice(*piece)]], params)[0].outputs[0].token_ids
        for piece, params in zip(PROMPTS, PARAMS, strict=True)
    ]


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model once more as a separate draft with a cyclic cache, so that its acceptance is known to be high."""
    return smollm2_pair(tmp_path_factory.mktemp("pair") / "separate", "model", window_size=256)


@pytest.fixture(scope="module")
def windowed(engine_dir: Path) -> LLM:
    """Self-speculation through a window that the longer prompts outgrow."""
    return LLM(engine_dir, window_size=256)


@pytest.mark.parametrize("length", [2, 5])
def test_seeded_sampling_is_plain_decoding_with_self_speculation(
    windowed: LLM, tokens: list[int], plain_ids: list[list[int]], length: int
) -> None:
    """The second length finds the prompts in the prefix cache."""
    params = [param.model_copy(update={"num_draft_tokens": length}) for param in PARAMS]
    outputs = windowed.generate([tokens[slice(*piece)] for piece in PROMPTS], params)
    assert [out.outputs[0].token_ids for out in outputs] == plain_ids
    assert sum(out.metrics.num_accepted_tokens for out in outputs) > 40


def test_seeded_sampling_is_plain_decoding_with_a_separate_draft(
    separate: Path, tokens: list[int], plain_ids: list[list[int]]
) -> None:
    """With preemption forced by a cache that the three requests outgrow."""
    llm = LLM(separate, num_draft_tokens=4, kv_cache_tokens=1552)
    outputs = llm.generate([tokens[slice(*piece)] for piece in PROMPTS], PARAMS)
    assert [out.outputs[0].token_ids for out in outputs] == plain_ids
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    assert sum(out.metrics.num_accepted_tokens for out in outputs) > 40


def test_seeded_sampling_is_plain_decoding_with_ngrams(
    tokens: list[int], plain_ids: list[list[int]], tmp_path: Path
) -> None:
    llm = LLM(smollm2_pair(tmp_path / "ngram", "ngram"), num_draft_tokens=4)
    outputs = llm.generate([tokens[slice(*piece)] for piece in PROMPTS], PARAMS)
    assert [out.outputs[0].token_ids for out in outputs] == plain_ids
    assert sum(out.metrics.num_draft_tokens for out in outputs) > 0


def test_a_wrapping_cyclic_cache_drafts_as_well_as_a_window_on_the_target(
    windowed: LLM, separate: Path, tokens: list[int]
) -> None:
    """Greedy over 250 tokens, so that the 256-token window of a 900-token prompt moves by many blocks.

    Sinks that follow the window, the rotation and the bounded prefill are right only if a draft that is the target's
    own model is accepted about as often as the target's own window (reference: 0.006 apart on average).
    """
    params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True, num_draft_tokens=4)
    prompt = tokens[2000:2900]
    (cyclic,) = LLM(separate).generate([prompt], params)
    (window,) = windowed.generate([prompt], params)
    assert cyclic.outputs[0].token_ids == window.outputs[0].token_ids
    assert cyclic.metrics.acceptance_rate > window.metrics.acceptance_rate - 0.1
    assert window.metrics.acceptance_rate > 0.5
