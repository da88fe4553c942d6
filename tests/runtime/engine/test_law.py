"""The output has the law of the target alone: exactly, over rounds, for every kind of draft.

And the check can fail: each fault that other projects have shipped is planted in the real source and must be found.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from magicdec.runtime.sampling import acceptance as rejection
from magicdec.runtime.sampling import draws
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import law, one_request
from tests.support.faults import faulty_copy
from tests.support.law import TOLERANCE, History, Table


@dataclass(frozen=True)
class Case:
    """A pair of tables, and how far to draft."""

    target: Table
    draft: Table
    draft_len: int

    def error(self, rule: law.Rule = one_request.rejection_sample) -> float:
        """How far the joint law of draft_len + 1 tokens is from the target's own."""
        length = self.draft_len + 1
        measured = law.joint_law(rule, law.stacked(self.target), self.draft, self.draft_len, length)
        return law.distance(measured, law.plain_law(self.target, length))


T2, T3, T4 = (law.random_table(v, seed=1) for v in (2, 3, 4))
D2, D3, D4 = (law.random_table(v, seed=2) for v in (2, 3, 4))
PEAKED = law.mixed(law.arg_max(T3), T3, 0.5)  # over-weights the target's own favourite

CASES = {
    "draft model": Case(T3, D3, 2),
    "draft model, 4 tokens": Case(T4, D4, 1),
    "draft model, 3 drafts": Case(T2, D2, 3),
    "draft model, 3 drafts of 3 tokens": Case(T3, D3, 3),
    "plain decoding": Case(T4, D4, 0),
    "n-gram": Case(T3, law.lookup(3), 3),
    "n-gram, 4 tokens": Case(T4, law.lookup(4), 2),
    "greedy": Case(law.arg_max(T3), D3, 2),
    "greedy, one-hot draft": Case(law.arg_max(T4), law.arg_max(D4), 3),
    "greedy, n-gram": Case(law.arg_max(T3), law.lookup(3), 3),
    "sampled target, greedy draft": Case(T3, law.arg_max(D3), 2),
    "draft over-weights the target's arg-max": Case(T3, PEAKED, 2),
    "draft lacks the target's arg-max": Case(T3, law.without(T3, 0), 2),
    "draft lacks the target's rarest": Case(T4, law.without(T4, 3), 1),
    "target lacks the draft's arg-max": Case(law.without(D3, 0), D3, 2),
    "target cut by top-k": Case(law.without(T4, 3), D4, 1),
    "both cut, otherwise": Case(law.without(T3, 2), law.without(D3, 2), 2),
    "identical": Case(T3, T3, 2),
    "nearly identical": Case(T3, law.mixed(T3, D3, 1 - 1e-6), 2),
    "peaked target": Case(law.random_table(3, seed=3, spread=0.1), law.random_table(3, seed=4, spread=0.1), 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_joint_law_is_the_targets_own(case: Case) -> None:
    assert case.error() < TOLERANCE


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=1.5, top_k=2, presence_penalty=0.5, logit_bias={1: 0.7}),
        SamplingParams(min_p=0.2, min_tokens=2),
        SamplingParams(temperature=0, repetition_penalty=1.5, min_tokens=1),
    ],
    ids=["penalties and top-p", "bias and top-k", "min-p and min-tokens", "greedy with penalties"],
)
def test_joint_law_with_sampling_parameters(params: SamplingParams) -> None:
    """The tables come from LogitsProcessor, the target's k + 1 rows in one call with the drafts as their history."""
    prompt, eos, bad_words = [2, 0], [0], [[1, 1]]

    def target_logits(history: History) -> torch.Tensor:
        return 2 * T3(history).log()

    def draft_logits(history: History) -> torch.Tensor:
        return 2 * D3(history).log()

    def processor(history: History) -> LogitsProcessor:
        made = LogitsProcessor(params, prompt, 3, eos, bad_words)
        made.append(history)
        return made

    def target_rows(history: History, drafts: History) -> torch.Tensor:
        logits = torch.stack([target_logits(history + drafts[:i]) for i in range(len(drafts) + 1)])
        return processor(history).probs(logits, drafts)

    def draft(history: History) -> torch.Tensor:
        return processor(history).probs(draft_logits(history)[None], ())[0]

    def target(history: History) -> torch.Tensor:
        return processor(history).probs(target_logits(history)[None], ())[0]

    measured = law.joint_law(one_request.rejection_sample, target_rows, draft, draft_len=2, length=3)
    assert law.distance(measured, law.plain_law(target, 3)) < TOLERANCE


def test_float32_tables_keep_the_law_to_their_own_rounding() -> None:
    def rounded(table: Table) -> Table:
        return lambda history: table(history).float()

    error = Case(rounded(T3), rounded(PEAKED), 2).error()
    assert error < 4 * torch.finfo(torch.float32).eps


# -- The check can fail ------------------------------------------------------------------------------------------------


ROWS = "rows = target[last[part]].astype(np.float64)"
RECOVER = "residual(rows[at], drafted)"
DRAW = "sample_draws[last[part]]"
ACCEPT = "draw * draft_prob < target_prob"
STANDS = "accepts(target[rows, tokens], np.asarray(token_probs), accept_draws)"
ALL = "(np.array(num_accepted) == counts)"
FAULTS = {
    "recover from the target": (RECOVER, "rows[at]"),
    "recover from the next row": (RECOVER, "residual(target[last[at] + 1], drafted)"),
    "recover from the first row": (RECOVER, "residual(target[:1], drafted)"),
    "recover with the first draw": (DRAW, f"sample_draws[np.where({ALL}, last, 0)]"),
    "residual of either sign": ("np.maximum(excess, 0, out=excess)", "np.abs(excess, out=excess)"),
    "bonus from the previous row": (ROWS, f"rows = target[last - {ALL}].astype(np.float64)"),
    "bonus from the draft": (ROWS, f"{ROWS}; rows[{ALL}] = draft_row(0, -1)"),
    "bonus with the first draw": (DRAW, f"sample_draws[np.where({ALL}, 0, last)]"),
    "accept the arg-max": (STANDS, f"({STANDS} | (tokens == target[rows].argmax(axis=1)))"),
    "accept what the target likes": (ACCEPT, "draw < target_prob"),
    "epsilon in the ratio": (ACCEPT, "draw * (draft_prob + 1e-6) < target_prob"),
    "epsilon in the comparison": (ACCEPT, f"{ACCEPT} + 1e-6"),
}


@pytest.mark.parametrize(("snippet", "replacement"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_breaks_the_law(monkeypatch: pytest.MonkeyPatch, snippet: str, replacement: str) -> None:
    module = faulty_copy(monkeypatch, rejection, snippet, replacement)
    error = CASES["draft over-weights the target's arg-max"].error(partial(one_request.rejection_sample, of=module))
    assert error > 100 * TOLERANCE


def test_unplanted_copy_keeps_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    module = faulty_copy(monkeypatch, rejection, ACCEPT, f"{ACCEPT}  # as it was")
    assert (
        CASES["draft over-weights the target's arg-max"].error(partial(one_request.rejection_sample, of=module))
        < TOLERANCE
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab_size", [2, 4])
def test_rejection_accepts_with_one_minus_total_variation(vocab_size: int, seed: int) -> None:
    target, draft = law.random_table(vocab_size, seed, 0.5)((0,)), law.random_table(vocab_size, seed, 0.5)((1,))
    rows = target.repeat(2, 1)
    accepted = sum(
        prob * law.accept_probability(one_request.rejection_sample, rows, draft[None], (token,), 0)
        for token, prob in enumerate(draft.tolist())
    )
    assert accepted == pytest.approx(1 - law.total_variation(target, draft), abs=TOLERANCE)


def test_rejection_with_counter_based_draws_has_the_law() -> None:
    """The whole chain with real draws, whose keys come round again after a rejection: chi-square over 3 tokens."""
    samples, counts = 6000, dict.fromkeys(itertools.product(range(2), repeat=3), 0)
    for seed in range(samples):
        output: History = ()
        while len(output) < 3:
            drafts: History = ()
            for _ in range(2):
                u = draws.uniform(seed, len(output + drafts), draws.Purpose.DRAFT)
                drafts = (*drafts, one_request.sample(D2(output + drafts), u))
            accept = [draws.uniform(seed, len(output) + i, draws.Purpose.ACCEPT) for i in range(2)]
            sample = [draws.uniform(seed, len(output) + i, draws.Purpose.SAMPLE) for i in range(3)]
            draft_probs = torch.stack([D2(output + drafts[:i]) for i in range(2)])
            target_probs = law.stacked(T2)(output, drafts)
            output += one_request.rejection_sample(target_probs, draft_probs, drafts, accept, sample).token_ids
        counts[output[:3]] += 1
    expected = law.plain_law(T2, 3)
    chi_square = sum((counts[h] - samples * p) ** 2 / (samples * p) for h, p in expected.items())
    assert chi_square < 35.0  # 7 degrees of freedom: a false alarm once in 90 000 seeds, and the seeds are fixed
