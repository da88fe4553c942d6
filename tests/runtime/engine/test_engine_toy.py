"""Whole engines on ToyRunner: the output is token for token that of plain decoding, whatever drafts and memory."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from scipy.stats import chisquare

from magicdec.runtime.engine.request import Request
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.toy_runner import ToyRunner

LENGTHS = (1, 3, 17, 60, 4, 33, 16, 9)  # of prompts: below, at and beyond blocks, window and chunks


def _prompts(count: int = 8, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(toy.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS[:count]]


def _params(count: int = 8, **options: Any) -> list[SamplingParams]:
    """Each request with its own seed; by default long enough for windows to move."""
    return [SamplingParams(**{"max_tokens": 50, "seed": seed, "ignore_eos": True, **options}) for seed in range(count)]


def _check(outputs: Sequence[RequestOutput], prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        assert output.prompt_token_ids == prompt
        for completion in output.outputs:
            toy.assert_equal(completion, toy.plain(prompt, param, index=completion.index))


def _preemptions(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_every_drafter_and_draft_length(kind: toy.Kind, num_draft_tokens: int, temperature: float) -> None:
    """A batch of eight in four places; drafts are made and some are accepted."""
    prompts, params = _prompts(), _params(temperature=temperature)
    outputs = toy.run(toy.engine(kind, num_draft_tokens=num_draft_tokens, num_blocks=128), prompts, params)
    _check(outputs, prompts, params)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 100
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 5


@pytest.mark.parametrize("kind", toy.KINDS)
def test_draft_length_zero_is_plain_decoding(kind: toy.Kind) -> None:
    """One row a token, no draft pass."""
    prompts, params = _prompts(), _params(num_draft_tokens=0)
    engine = toy.engine(kind, num_blocks=128)
    _check(toy.run(engine, prompts, params), prompts, params)
    assert isinstance(engine.runner, ToyRunner)
    assert engine.runner.num_rows == sum(LENGTHS) + 8 * 49


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_batch_of_one(kind: toy.Kind) -> None:
    """The same without neighbours, one after the other."""
    prompts, params = _prompts(), _params(temperature=0.8)
    engine = toy.engine(kind, max_batch_size=1, max_num_tokens=8)
    outputs = [toy.run(engine, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    _check(outputs, prompts, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_blocks", [28, 34])
@pytest.mark.parametrize("kind", toy.KINDS)
def test_forced_preemption(kind: toy.Kind, num_blocks: int, temperature: float) -> None:
    """A pool for one or two sequences and four that want it."""
    prompts, params = _prompts(), _params(temperature=temperature, logprobs=1)
    outputs = toy.run(toy.engine(kind, num_blocks=num_blocks), prompts, params)
    assert _preemptions(outputs) >= 5
    _check(outputs, prompts, params)


@pytest.mark.parametrize("max_num_tokens", [4, 5, 11])
@pytest.mark.parametrize("kind", toy.KINDS)
def test_chunked_prefill(kind: toy.Kind, max_num_tokens: int) -> None:
    """Chunks of any length beside decoding rows; 4 is the least that a batch of 4 can do with."""
    prompts, params = _prompts(), _params(max_tokens=20)
    outputs = toy.run(toy.engine(kind, max_num_tokens=max_num_tokens, num_blocks=96), prompts, params)
    _check(outputs, prompts, params)


@pytest.mark.parametrize(("block_size", "window_size", "num_sink_tokens"), [(1, 1, 1), (2, 2, 1), (2, 5, 3), (8, 8, 9)])
@pytest.mark.parametrize("kind", ["self", "in_cache", "absolute"])
def test_windows_that_wrap_many_times(kind: toy.Kind, block_size: int, window_size: int, num_sink_tokens: int) -> None:
    """Up to two hundred turns of the circle, and short windows that are no whole blocks."""
    prompts, params = _prompts(3), _params(3, max_tokens=190)
    engine = toy.engine(
        kind,
        num_draft_tokens=min(2, block_size),
        num_blocks=800 // block_size,
        block_size=block_size,
        window_size=window_size,
        num_sink_tokens=num_sink_tokens,
    )
    _check(toy.run(engine, prompts, params), prompts, params)


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_draft_length_that_changes_with_every_step(kind: toy.Kind) -> None:
    """Also plain steps between rounds, as a controller may choose."""
    rng = random.Random(0)

    def draft_length(_: Request) -> int:
        return rng.choice([0, 0, 1, 2, 4])

    prompts, params = _prompts(), _params()
    engine = toy.engine(kind, num_draft_tokens=4, num_blocks=40, draft_length=draft_length)
    _check(toy.run(engine, prompts, params), prompts, params)


OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {3: 6.0, 5: 6.0}},  # two tokens only: n-grams come again
    "bad_words": {"bad_words": ["ab", "c", "d"], "logit_bias": {1: 1.5, 2: 1.5}},
    "min_tokens": {"min_tokens": 25, "logit_bias": {toy.EOS: 3.0, 7: 3.0}, "stop_token_ids": [7]},
    "logprobs": {"logprobs": 5},
    "stop": {"stop": ["ab", "ee", "d e"], "min_tokens": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_sampling_parameters(kind: toy.Kind, options: dict[str, Any]) -> None:
    """All with log-probabilities and ends, in a pool that forces preemption."""
    prompts, params = _prompts(6), _params(6, **{"logprobs": 2, "ignore_eos": False, "max_tokens": 40, **options})
    outputs = toy.run(toy.engine(kind, num_blocks=30), prompts, params)
    _check(outputs, prompts, params)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_greedy_is_the_same_under_both_rules(kind: toy.Kind, acceptance: str) -> None:
    """No draw decides anything, so no seed is needed."""
    prompts, params = _prompts(), _params(temperature=0, seed=None, acceptance=acceptance, logprobs=0)
    outputs = toy.run(toy.engine(kind, num_blocks=36), prompts, params)
    _check(outputs, prompts, params)


@pytest.mark.parametrize("kind", toy.KINDS)
def test_several_outputs_share_the_prompts_blocks(kind: toy.Kind) -> None:
    """n = 3: each output has its own randomness; the second and third find the full prompt blocks."""
    prompts, params = _prompts(4), _params(4, n=3, logprobs=1)
    outputs = toy.run(toy.engine(kind, num_blocks=128), prompts, params)
    _check(outputs, prompts, params)
    assert [o.metrics.num_cached_tokens for o in outputs] == [2 * ((length - 1) // 4) * 4 for length in LENGTHS[:4]]
    assert len({tuple(completion.token_ids) for completion in outputs[3].outputs}) == 3


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_several_outputs_under_preemption(kind: toy.Kind) -> None:
    """Siblings and leaders are preempted too; a find is counted once."""
    prompts, params = _prompts(5), _params(5, n=3)
    outputs = toy.run(toy.engine(kind, num_blocks=28), prompts, params)
    assert _preemptions(outputs) > 0
    _check(outputs, prompts, params)
    for output in outputs:
        assert output.metrics.num_cached_tokens <= 2 * output.metrics.num_prompt_tokens


@pytest.mark.parametrize("length", [16, 33])
@pytest.mark.parametrize("kind", toy.KINDS)
def test_prefix_cache_hits_change_nothing(kind: toy.Kind, length: int) -> None:
    """The same prompt again, a longer one, and a conversation that goes on from the answer."""
    engine = toy.engine(kind, num_blocks=128)
    prompt, (param, *_) = _prompts()[LENGTHS.index(length)], _params()
    (first,) = toy.run(engine, [prompt], [param])
    assert first.metrics.num_cached_tokens == 0
    answered = prompt + first.outputs[0].token_ids
    again = [prompt, [*prompt, 1, 2], [*answered, 3]]
    outputs = toy.run(engine, again, [param] * 3)
    _check(outputs, again, [param] * 3)
    # The last answer token was chosen and never read, so the conversation finds the full blocks before it.
    assert [o.metrics.num_cached_tokens for o in outputs] == [
        (length - 1) // 4 * 4,
        length // 4 * 4,
        (len(answered) - 1) // 4 * 4,
    ]


def test_a_find_is_counted_once_under_preemption() -> None:
    """A sequence that finds its own blocks again after a preemption has not found anything of another's."""
    prompts, params = [[*range(1, 13), i, *range(i, 12)] for i in range(4)], _params(4, max_tokens=60)
    outputs = toy.run(toy.engine("plain", num_blocks=24, max_num_tokens=6), prompts, params)
    assert _preemptions(outputs) > 0
    assert max(output.metrics.num_cached_tokens for output in outputs) <= 12


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_seeds_with_different_neighbours(kind: toy.Kind) -> None:
    """Alone, in the middle of others, and after others came and went."""
    prompts, params = _prompts(), _params()
    for order in ([3], [0, 3, 5], [7, 6, 5, 4, 3, 2]):
        outputs = toy.run(toy.engine(kind), [prompts[i] for i in order], [params[i] for i in order])
        toy.assert_equal(outputs[order.index(3)].outputs[0], toy.plain(prompts[3], params[3]))


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_without_a_seed_neighbours_do_not_matter(kind: toy.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the rejection rule depends on the drafts, so memory must not be short; on nothing else."""
    monkeypatch.setattr("magicdec.runtime.engine.engine.fresh_seed", lambda: 7)
    prompts, params = _prompts(), _params(seed=None)
    texts = set()
    for order in ([3], [0, 3, 5], [7, 6, 3]):
        engine = toy.engine(kind, num_blocks=256, max_num_tokens=64)
        outputs = toy.run(engine, [prompts[i] for i in order], [params[i] for i in order])
        texts.add(tuple(outputs[order.index(3)].outputs[0].token_ids))
    assert len(texts) == 1


@pytest.mark.parametrize("kind", ["plain", "self", "in_cache", "ngram"])
def test_law_of_the_rejection_rule_under_preemption(kind: toy.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of two kinds: samples of an engine short of memory have the law that enumeration gives."""
    seeds = iter(range(10_000))
    monkeypatch.setattr("magicdec.runtime.engine.engine.fresh_seed", lambda: next(seeds))
    count, prompt = 1500, [5, 3, 5, 3, 5, 5, 3, 3]
    param = SamplingParams(max_tokens=4, logit_bias={3: 50.0, 5: 50.0})
    engine = toy.engine(
        kind,
        num_draft_tokens=2,
        num_blocks=8,
        block_size=2,
        window_size=2,
        max_batch_size=3,
        prefix_caching=False,
    )
    outputs = toy.run(engine, [prompt] * count, [param] * count)
    assert kind == "plain" or sum(output.metrics.num_accepted_tokens for output in outputs) > count / 10
    assert _preemptions(outputs) > count / 10
    law = _law(prompt, param)
    observed = dict.fromkeys(law, 0)
    for output in outputs:
        observed[tuple(output.outputs[0].token_ids)] += 1
    assert chisquare(list(observed.values()), [count * p for p in law.values()]).pvalue > 1e-3


def _law(prompt: list[int], param: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each output, by enumeration."""
    language = ToyRunner(vocab_size=toy.VOCAB_SIZE, detail=toy.DETAIL)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(param.max_tokens):
        grown: dict[tuple[int, ...], float] = {}
        for output, weight in law.items():
            processor = LogitsProcessor(param, prompt, toy.VOCAB_SIZE)
            probs = processor.probs(language.next_logits([*prompt, *output])[None], [])[0]
            grown |= {(*output, token): weight * float(probs[token]) for token in (param.logit_bias or {})}
        law = grown
    return law
