"""Chi-square of a real engine's samples against the exact law of plain decoding, for the rejection rule.

The expected law is computed from plain forward passes of the same runner, so only the observed side is random, and
that is fixed by seeds: the test always gives the same p-value.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling import acceptance as rejection
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.conftest import PairFactory
from tests.support.engines import Drafter

PROMPT = [3 + index * 37 % 120 for index in range(100)] + [5, 40, 33, 40, 33, 40, 33, 40]  # longer than the window
LENGTH, NUM_SAMPLES = 4, 2000
SAMPLING: dict[str, dict[str, Any]] = {
    "top-k": {"temperature": 1.3, "top_k": 4},
    "top-p": {"temperature": 0.8, "top_p": 0.6},
    "penalties": {"top_k": 4, "repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.8},
    "min-p and bias": {"min_p": 0.2, "logit_bias": {40: 5.0, 33: 4.5}},
}


def params_of(name: str, seed: int, num_draft_tokens: int) -> SamplingParams:
    return SamplingParams(
        **SAMPLING[name],
        seed=seed,
        acceptance="rejection",
        max_tokens=LENGTH,
        ignore_eos=True,
        num_draft_tokens=num_draft_tokens,
    )


def exact_law(llm: LLM, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens, by plain passes over each prefix."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in law.items():
            for token, chance in next_law(llm, params, output).items():
                extended = (*output, token)
                longer[extended] = probability * chance
        law = longer
    return law


def next_law(llm: LLM, params: SamplingParams, output: Sequence[int]) -> dict[int, float]:
    tokens = [*PROMPT, *output]
    row = SequenceInput(tokens, range(len(tokens)), 0, range(8), range(len(tokens)), num_logits=1)
    processor = LogitsProcessor(params, PROMPT, llm.runner.vocab_size, [])
    processor.append(output)
    probs = processor.probs(llm.runner.forward(pack([row])), [])[0]
    return {int(token): float(probs[token]) for token in torch.nonzero(probs).flatten()}


def p_value(llm: LLM, name: str) -> float:
    expected = exact_law(llm, params_of(name, 0, 0))
    assert 8 <= len(expected) < 3000, "a law that a sample can be told from"
    params = [params_of(name, seed, 3) for seed in range(NUM_SAMPLES)]
    outputs = llm.generate([PROMPT] * NUM_SAMPLES, params)
    counts = Counter(tuple(out.outputs[0].token_ids) for out in outputs)
    assert set(counts) <= set(expected), "a token outside the law"
    accepted = sum(out.metrics.num_accepted_tokens for out in outputs)
    rejected = sum(out.metrics.num_draft_tokens for out in outputs) - accepted
    assert min(accepted, rejected) > NUM_SAMPLES / 10, "both outcomes must be frequent"
    cells = merge_rare(expected, counts)
    return float(chisquare([c for c, _ in cells], [e for _, e in cells]).pvalue)


def merge_rare(expected: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> list[tuple[float, float]]:
    """(observed, expected) cells; outcomes expected under 8 times share one."""
    cells = [(counts[output], NUM_SAMPLES * chance) for output, chance in expected.items()]
    common = [cell for cell in cells if cell[1] >= 8]
    rare = [cell for cell in cells if cell[1] < 8]
    if rare:
        common.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    return [(float(observed), wanted) for observed, wanted in common]


@pytest.mark.parametrize(
    ("drafter", "name"),
    [*itertools.product(["in_cache"], SAMPLING), ("self", "top-k"), ("ngram", "min-p and bias")],
)
def test_samples_follow_the_law_of_plain_decoding(pair: PairFactory, drafter: Drafter, name: str) -> None:
    llm = LLM(pair(drafter), dtype="float64", max_batch_size=50, max_num_tokens=1000, max_seq_len=128)
    assert p_value(llm, name) > 1e-3


def test_the_chi_square_sees_a_wrong_residual(pair: PairFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovering from the target instead of the residual must be noticed with this many samples."""
    monkeypatch.setattr(rejection, "residual", lambda target_probs, _: target_probs)
    llm = LLM(pair("in_cache"), dtype="float64", max_batch_size=50, max_num_tokens=1000, max_seq_len=128)
    assert p_value(llm, "top-k") < 1e-6
