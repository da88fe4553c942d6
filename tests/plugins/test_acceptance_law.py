"""The fused acceptance has the law of the target alone; and faults that are planted in its source break it."""

import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from magicdec.plugins import acceptance
from magicdec.runtime.sampling.acceptance import VerifyOutput
from tests.support import law, one_request
from tests.support.faults import faulty_copy
from tests.support.law import Table
from tests.support.one_request import gumbel

T2, T3, T20 = (law.random_table(v, seed=1) for v in (2, 3, 20))
D2, D3, D20 = (law.random_table(v, seed=2) for v in (2, 3, 20))
LAWS: dict[str, tuple[Table, Table, int]] = {
    "two drafts": (T2, D2, 2),
    "three tokens": (T3, D3, 1),
    "draft over-weights the target's arg-max": (T3, law.mixed(law.arg_max(T3), T3, 0.5), 1),
    "n-gram": (T3, law.lookup(3), 2),
    "target lacks the draft's arg-max": (law.without(D3, 0), D3, 1),
    "identical": (T2, T2, 2),
}


def rule_of(module: ModuleType, temperature: float = 0.7, block_size: int = 16) -> law.Rule:
    """`accept` as a function of probabilities: logits are their logarithms times the temperature."""

    def rule(
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor,
        draft_token_ids: Sequence[int],
        accept_draws: Sequence[float],
        sample_draws: Sequence[float],
        /,
    ) -> VerifyOutput:
        request = module.AcceptanceRequest(
            module.Rule.REJECTION, draft_token_ids, temperature, accept_draws, sample_draws
        )
        drafts = draft_probs.reshape(len(draft_token_ids), target_probs.shape[1])
        logits = target_probs.log() * temperature
        (outcome,) = module.accept(logits, drafts, [request], gumbel, block_size)
        accepted = tuple(draft_token_ids[: outcome.num_accepted])
        return VerifyOutput(outcome.num_accepted, (*accepted, outcome.token_id))

    return rule


def law_error(module: ModuleType, target: Table, draft: Table, draft_len: int) -> float:
    measured = law.joint_law(rule_of(module), law.stacked(target), draft, draft_len, draft_len + 1)
    return law.distance(measured, law.plain_law(target, draft_len + 1))


def steep_error(module: ModuleType) -> float:
    """Error of one round's law where the largest weights of the blocks differ by many powers of two."""
    target = T20(()) * torch.logspace(0, -5, 20, base=10, dtype=torch.float64)
    rows = torch.stack([target / target.sum(), T20((4,))])
    draft, token = D20(()), 4
    stands = min(1.0, float(rows[0, token] / draft[token]))
    excess = (rows[0] - draft).clamp(min=0)
    wanted: law.Law = {(t,): (1 - stands) * p for t, p in enumerate((excess / excess.sum()).tolist())}
    wanted |= {(token, t): stands * p for t, p in enumerate(rows[1].tolist())}
    return law.distance(law.round_law(rule_of(module), rows, draft[None], (token,)), wanted)


@pytest.mark.parametrize("case", LAWS.values(), ids=LAWS.keys())
def test_joint_law_is_the_targets_own(case: tuple[Table, Table, int]) -> None:
    assert law_error(acceptance, *case) < law.TOLERANCE


def test_law_over_several_blocks() -> None:
    assert steep_error(acceptance) < law.TOLERANCE


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0], ids=["flat", "usual", "peaked"])
def test_law_of_a_real_vocabulary(spread: float) -> None:
    """The docs' figures: how far the law is from a softmax's, and how often a draw falls between the two."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=128_256) * spread).bfloat16()
    row = acceptance._Row(logits, math.log2(math.e), acceptance.BLOCK_SIZE)
    weights = row.weights().double()
    exact, single = logits.double().softmax(-1), logits.float().softmax(-1).double()
    assert law.total_variation(weights / weights.sum(), exact) < 1e-8  # at most V * 2 ** -44
    assert law.total_variation(weights / weights.sum(), single / single.sum()) < torch.finfo(torch.float32).eps
    draws = rng.random(5000)
    assert sum(row.sample(u) != one_request.sample(exact, u) for u in draws[:500]) == 0
    found = torch.tensor([row.sample(u) for u in draws])
    cumulative = single.cumsum(0)
    between = found != torch.searchsorted(cumulative, torch.from_numpy(draws) * cumulative[-1], right=True)
    assert int(between.sum()) <= 3


FAULTS = {
    "recovers from the target": ("excess = row.excess(draft_probs[i])", "excess = row.weights()"),
    "bonus draws from an earlier row": ("Outcome(k, rows[k].sample", "Outcome(k, rows[0].sample"),
    "forgets the draft's probability": ("* float(draft_probs[i, token_id]) *", "*"),
    "shares of blocks at their own scale": (">> (self.top - self.tops).clamp(max=63).long()", ">> 0"),
    "excess against unnormalised drafts": ("(draft_probs * float(self.total))", "(draft_probs * 2.0**WEIGHT_BITS)"),
    "greedy temperature": ("1.0 if self.rule is Rule.GREEDY else self.temperature", "1.0"),
    "a coefficient too few": ("EXP2_COEFFICIENTS[-2::-1]", "EXP2_COEFFICIENTS[-6::-1]"),
    "search stops one early": ("(cumulative <= target)", "(cumulative[:-1] < target - cumulative[0])"),
}


@pytest.mark.parametrize(("snippet", "replacement"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_breaks_the_law(monkeypatch: pytest.MonkeyPatch, snippet: str, replacement: str) -> None:
    module = faulty_copy(monkeypatch, acceptance, snippet, replacement)
    assert steep_error(module) > 100 * law.TOLERANCE
