"""Engines that choose draft length and drafter themselves, under clocks that lie: the output is plain decoding's."""

import random
from collections.abc import Callable

import pytest
from scipy.stats import chisquare

from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.drafting.cost_model import CostPrior
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.switch import ProposerSwitch, controlled
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.engine.test_engine_toy import _law as enumerated_law
from tests.support import toy

PROMPTS = [[1, 2, 3], [4, 5, 4, 5, 4], [6, 7, 8, 9] * 6, [3, 3], [9, 1, 4], [2]]
PARAMS = [
    SamplingParams(max_tokens=60, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=1.3, top_p=0.8, seed=7),
    SamplingParams(max_tokens=60, temperature=0, repetition_penalty=1.4),
    SamplingParams(max_tokens=60, seed=9, num_draft_tokens=2, ignore_eos=True),
    SamplingParams(max_tokens=60, seed=11, num_draft_tokens=0, ignore_eos=True),
]


def _liar(seed: int) -> Callable[[], float]:
    """Time that stands still, creeps or leaps."""
    rng, now = random.Random(seed), [0.0]

    def clock() -> float:
        now[0] += rng.choice([0.0, 1e-6, 1e-3, 1.0, 1e3]) * rng.random()
        return now[0]

    return clock


def auto_engine(
    kind: toy.Kind, clock: Callable[[], float], num_blocks: int = 64, draft_clock: Callable[[], float] | None = None
) -> Engine:
    """Drafts of one kind, or looked up, or none."""
    engine = toy.engine(kind, num_draft_tokens=4, num_blocks=num_blocks)
    controller = DraftController(4, CostPrior(drafts=(0.25, None)))
    lookup = NGramProposer(min_ngram=1, max_ngram=3)
    engine.use(controlled(controller, [engine.drafting.proposer, lookup], draft_clock or clock))
    engine._clock = clock
    return engine


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["self", "in_cache", "absolute"])
def test_output_is_plain_decodings_whatever_the_clock_says(kind: toy.Kind, seed: int) -> None:
    """Greedy and coupled: token for token, with preemptions, and with lengths all over the place."""
    engine = auto_engine(kind, _liar(seed), num_blocks=40)
    outputs = toy.run(engine, PROMPTS, PARAMS)
    for output, prompt, params in zip(outputs, PROMPTS, PARAMS, strict=True):
        toy.assert_equal(output.outputs[0], toy.plain(prompt, params))
    free = [output.metrics.draft_lengths for output in outputs[:4]]
    assert len(set().union(*free)) > 2, "the clock has moved the lengths"
    assert set(outputs[4].metrics.draft_lengths) <= {0, 1, 2}
    assert set(outputs[5].metrics.draft_lengths) == {0}


@pytest.mark.parametrize("kind", ["self", "in_cache"])
def test_law_of_the_rejection_rule(kind: toy.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of two kinds, lengths by acceptance and by a lying clock: samples have the law that is enumerated."""
    seeds = iter(range(10_000))
    monkeypatch.setattr("magicdec.runtime.engine.engine.fresh_seed", lambda: next(seeds))
    count, prompt = 1000, [5, 3, 5, 3, 5, 5, 3, 3]
    params = SamplingParams(max_tokens=4, logit_bias={3: 50.0, 5: 50.0})
    outputs = toy.run(auto_engine(kind, _liar(4), draft_clock=lambda: 0.0), [prompt] * count, [params] * count)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > count / 10
    law = enumerated_law(prompt, params)
    observed = dict.fromkeys(law, 0)
    for output in outputs:
        observed[tuple(output.outputs[0].token_ids)] += 1
    assert chisquare(list(observed.values()), [count * p for p in law.values()]).pvalue > 1e-3


def test_decoding_steps_are_counted_by_length() -> None:
    engine = auto_engine("self", _liar(1))
    for output in toy.run(engine, PROMPTS, PARAMS):
        metrics = output.metrics
        steps = sum(metrics.draft_lengths.values())
        assert metrics.num_output_tokens == 1 + steps + metrics.num_accepted_tokens
        assert sum(length * count for length, count in metrics.draft_lengths.items()) == metrics.num_draft_tokens


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    engine = auto_engine("in_cache", _liar(2))
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(index), prompt, params)
    for _ in range(10):
        engine.step()
    engine.abort("0")
    toy.drain(engine)
    controller = engine.drafting.listener
    assert isinstance(controller, DraftController)
    assert not any(plan.choices for plan in controller._plans)
    assert not any(rates._own for rates in controller.known.rates)


def test_a_plain_step_runs_no_drafter() -> None:
    """Length 0 has no speculative overhead: the proposers are not even called."""
    calls: list[int] = []
    engine = auto_engine("self", _liar(3))
    assert isinstance(engine.drafting.proposer, ProposerSwitch)
    for proposer in engine.drafting.proposer.proposers:
        proposer.propose = lambda scheduled: calls.append(len(scheduled)) or []  # type: ignore[method-assign, func-returns-value]
    toy.run(engine, [[1, 2, 3]], [SamplingParams(max_tokens=30, num_draft_tokens=0, ignore_eos=True)])
    assert calls == []
