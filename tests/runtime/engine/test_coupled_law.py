"""The coupled rule: token for token plain decoding for every noise, and so with the target's own law.

Its law is found exactly: for two tokens by cutting the axis of the noise, for more by quadrature over the uniforms
behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from magicdec.runtime.sampling import acceptance as rejection
from magicdec.runtime.sampling.acceptance import VerifyOutput
from tests.support import law, one_request
from tests.support.faults import faulty_copy
from tests.support.law import TOLERANCE, History, Law, Table

T2, T3, T4 = (law.random_table(v, seed=1) for v in (2, 3, 4))
D2, D3, D4 = (law.random_table(v, seed=2) for v in (2, 3, 4))

CoupledRule = Callable[[torch.Tensor, History, torch.Tensor], VerifyOutput]


def coupled_run(
    target: Table, draft: Callable[[History, torch.Tensor], int], draft_len: int, noise: torch.Tensor, rule: CoupledRule
) -> History:
    """Output over rounds until all rows of `noise` [length, V] but the last draft_len are used."""
    output: History = ()
    length = len(noise) - draft_len
    while len(output) < length:
        rows = noise[len(output) : len(output) + draft_len + 1]
        drafts: History = ()
        for i in range(draft_len):
            drafts = (*drafts, draft(output + drafts, rows[i]))
        output += rule(law.stacked(target)(output, drafts), drafts, rows).token_ids
    return output[:length]


def coupled_draft(table: Table) -> Callable[[History, torch.Tensor], int]:
    return lambda history, noise: one_request.sample_gumbel(table(history), noise)


def deterministic_draft(table: Table) -> Callable[[History, torch.Tensor], int]:
    return lambda history, _: int(table(history).argmax())


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (T3, coupled_draft(D3)),
        (T4, coupled_draft(D4)),
        (T3, coupled_draft(T3)),
        (T3, coupled_draft(law.without(T3, 0))),
        (law.without(D3, 0), coupled_draft(D3)),
        (T3, deterministic_draft(law.lookup(3))),
        (law.arg_max(T3), coupled_draft(D3)),
        (law.arg_max(T3), deterministic_draft(law.lookup(3))),
    ],
    ids=["model", "model, V=4", "identical", "lacks arg-max", "cut target", "n-gram", "greedy", "greedy, n-gram"],
)
def test_coupled_output_is_plain_decodings_for_every_noise(
    target: Table, draft: Callable[[History, torch.Tensor], int], draft_len: int
) -> None:
    vocab_size = len(target(()))
    for seed in range(40):
        noise = torch.stack([one_request.gumbel(seed, position, vocab_size) for position in range(8 + draft_len)])
        plain = coupled_run(target, draft, 0, noise[:8], one_request.coupled_sample)
        assert coupled_run(target, draft, draft_len, noise, one_request.coupled_sample) == plain


def pair(difference: float) -> torch.Tensor:
    """Noise [2] of two tokens; only the difference decides, and that of two Gumbels is logistic."""
    return torch.tensor([difference / 2, -difference / 2], dtype=torch.float64)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def coupled_joint_law(rule: CoupledRule, target: Table, draft: Table, draft_len: int, length: int) -> Law:
    """Joint law for two tokens: cut each position's axis where a token of target or draft changes, run each cell."""
    axes = []
    for position in range(length):
        histories = itertools.product((0, 1), repeat=position)
        cuts = sorted(
            law.threshold(lambda d, p=probs: one_request.sample_gumbel(p, pair(d)) == 1, -60, 60)  # type: ignore[misc]
            for history in histories
            for probs in (target(history), draft(history))
        )
        edges = [-60.0, *cuts, 60.0]
        axes.append([((a + b) / 2, logistic(b) - logistic(a)) for a, b in itertools.pairwise(edges) if b > a])
    measured: Law = {}
    for cell in itertools.product(*axes):
        noise = torch.stack([pair(d) for d, _ in cell] + [pair(0.0)] * draft_len)
        output = coupled_run(target, coupled_draft(draft), draft_len, noise, rule)
        measured[output] = measured.get(output, 0.0) + math.prod(share for _, share in cell)
    return measured


@pytest.mark.parametrize("draft_len", [0, 1, 2])
@pytest.mark.parametrize("draft", [D2, T2, law.lookup(2), law.mixed(law.arg_max(T2), T2, 0.7)], ids=range(4))
def test_coupled_joint_law_is_the_targets_own(draft: Table, draft_len: int) -> None:
    measured = coupled_joint_law(one_request.coupled_sample, T2, draft, draft_len, 3)
    assert law.distance(measured, law.plain_law(T2, 3)) < TOLERANCE


COUPLED_FAULTS = {
    "emit the draft's token": (
        "        if not going:\n",
        "        for b, token_id in drawn:\n"
        "            chosen[b][i] = foreseen[b][i] if foreseen[b][i] is not None else token_id\n"
        "        if not going:\n",
    ),
    "noise of the first row": ("noise(going, i)", "noise(going, 0)"),
    "first row of the target": ("firsts[going] + i", "firsts[going]"),
    "go on after a mismatch": ("if foreseen[b][i] == token_id", "if foreseen[b][i] is not None"),
}


@pytest.mark.parametrize(("snippet", "replacement"), COUPLED_FAULTS.values(), ids=COUPLED_FAULTS.keys())
def test_planted_fault_breaks_the_coupled_law(monkeypatch: pytest.MonkeyPatch, snippet: str, replacement: str) -> None:
    module = faulty_copy(monkeypatch, rejection, snippet, replacement)
    measured = coupled_joint_law(partial(one_request.coupled_sample, of=module), T2, D2, 2, 3)
    assert law.distance(measured, law.plain_law(T2, 3)) > 100 * TOLERANCE


def first_token(probs: torch.Tensor, noise: list[float]) -> int:
    """The coupled rule's first token; a draft that may or may not be right stands beside it."""
    row = torch.tensor(noise, dtype=torch.float64)
    return one_request.coupled_sample(probs.repeat(2, 1), [0], torch.stack([row, row])).token_ids[0]


def gumbel_of(exponential: float) -> float:
    return -math.log(exponential)


def exponential_of(s: float) -> float:
    """-log(u) of u = 1 / (1 + exp(-s))."""
    return math.log1p(math.exp(-s))


def exponential_above(cut: float, s: float) -> float:
    """-log(u) of the point u that lies at 1 / (1 + exp(-s)) of the way from exp(-cut) to 1."""
    rest = -math.expm1(-cut) / (1 + math.exp(s))  # 1 - u
    return -math.log1p(-rest) if rest < 0.5 else -math.log(math.exp(-cut) - math.expm1(-cut) / (1 + math.exp(-s)))


def score(probs: torch.Tensor, token: int, noise: float) -> float:
    """Of which the greatest wins; here it says where to look first."""
    return math.log(probs[token]) + noise


def wins(probs: torch.Tensor, *others: float) -> float:
    """Probability that token 0 comes out when the noise of the others is given, over its own uniform."""
    guess = max(score(probs, i, g) for i, g in enumerate(others, start=1)) - math.log(probs[0])
    edge = law.threshold(lambda g: first_token(probs, [g, *others]) != 0, -90, 90, guess)
    return -math.expm1(-math.exp(-edge))


@pytest.mark.parametrize("prob", [0.5, 0.03, 0.9])
def test_one_token_of_two_by_quadrature(prob: float) -> None:
    probs = torch.tensor([prob, 1 - prob], dtype=torch.float64)
    measured = law.tanh_sinh(lambda s: wins(probs, gumbel_of(exponential_of(s))), step=1 / 10)
    assert measured == pytest.approx(prob, abs=TOLERANCE)


def test_quadrature_finds_noise_of_the_wrong_size(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.sample_gumbel_all
    monkeypatch.setattr(rejection, "sample_gumbel_all", lambda probs, noise: right(probs, noise * (1 + 1e-6)))
    probs = torch.tensor([0.3, 0.7], dtype=torch.float64)
    measured = law.tanh_sinh(lambda s: wins(probs, gumbel_of(exponential_of(s))), step=1 / 10)
    assert abs(measured - 0.3) > 100 * TOLERANCE


@pytest.mark.parametrize("probs", [(0.2, 0.5, 0.3), (0.7, 0.1, 0.2)])
def test_one_token_of_three_by_quadrature(probs: tuple[float, ...]) -> None:
    """The inner integral is cut where the stronger of the other two changes: on each side it is smooth."""
    table = torch.tensor(probs, dtype=torch.float64)

    def inner(s: float) -> float:
        first = gumbel_of(exponential_of(s))
        guess = score(table, 1, first) - math.log(table[2])
        edge = law.threshold(lambda g: first_token(table, [-200.0, first, g]) == 1, -90, 90, guess)
        cut = math.exp(-edge)  # -log(u)
        below = law.tanh_sinh(lambda r: wins(table, first, gumbel_of(cut + exponential_of(r))))
        above = law.tanh_sinh(lambda r: wins(table, first, gumbel_of(exponential_above(cut, r))))
        return math.exp(-cut) * below - math.expm1(-cut) * above

    assert law.tanh_sinh(inner) == pytest.approx(probs[0], abs=TOLERANCE)


def coupled_acceptance(target: torch.Tensor, draft: torch.Tensor) -> float:
    """Both arg-max fall on x with probability 1 / sum over y of max(target[y] / target[x], draft[y] / draft[x])."""
    ratio = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])  # [x, y]
    return float((1 / ratio.sum(dim=1)).sum())


@pytest.mark.parametrize("seed", range(4))
def test_coupled_acceptance(seed: int) -> None:
    """The share of seeds whose draft is accepted lies within 5 standard deviations of the formula, above the bound."""
    target, draft = law.random_table(4, seed, 0.7)((0,)), law.random_table(4, seed, 0.7)((1,))
    expected, variation = coupled_acceptance(target, draft), law.total_variation(target, draft)
    assert (1 - variation) / (1 + variation) <= expected + 1e-12 <= 1 - variation + 2e-12
    tries, accepted = 8000, 0
    for position in range(tries):
        noise = one_request.gumbel(seed, position, 4)
        token = one_request.sample_gumbel(draft, noise)
        accepted += one_request.coupled_sample(target.repeat(2, 1), [token], torch.stack([noise, noise])).num_accepted
    assert abs(accepted / tries - expected) < 5 * math.sqrt(expected * (1 - expected) / tries)
