"""The exact joint law of generated tokens, measured on the real acceptance code as a black box of its draws.

The code is only called, never looked into: where it switches from one outcome to the next is found by bisection on a
draw, and the distance between switches is a probability. The textbook says where to look first, which is quick where
the code is right; a switch counts only where the code was seen to make it. Draft tokens are enumerated with their
probabilities, rounds follow one another with tables that depend on the whole history. Nothing is sampled, so 1e-9 is a
real tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch

from magicdec.runtime.sampling.acceptance import VerifyOutput

History = tuple[int, ...]
Law = dict[History, float]
Table = Callable[[History], torch.Tensor]  # the distribution [V], float64, of the token after a history
TargetRows = Callable[[History, History], torch.Tensor]  # target_probs [k + 1, V] of committed tokens and k drafts

ALMOST_ONE = 1 - 2.0**-53  # the largest draw there is
TOLERANCE = 1e-9
CLOSE = 2.0**-39  # how near to a guess a switch must be; the error of a sum of hundreds is below the tolerance


class Rule(Protocol):
    """`rejection_sample`, or a faulty copy of it."""

    def __call__(
        self,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor,
        draft_token_ids: Sequence[int],
        accept_draws: Sequence[float],
        sample_draws: Sequence[float],
        /,
    ) -> VerifyOutput: ...


def random_table(vocab_size: int, seed: int, spread: float = 1.0) -> Table:
    """A distribution for each history, unrelated to those of all others; small `spread` makes it peaked."""

    @cache
    def table(history: History) -> torch.Tensor:
        rng = np.random.default_rng([seed, len(history), *history])
        return torch.from_numpy(rng.dirichlet([spread] * vocab_size))

    return table


def mixed(first: Table, second: Table, weight: float) -> Table:
    """`weight` of the first and the rest of the second."""
    return cache(lambda history: weight * first(history) + (1 - weight) * second(history))


def arg_max(table: Table) -> Table:
    """One-hot at the most likely token: the greedy case."""
    return cache(lambda history: one_hot(int(table(history).argmax()), len(table(history))))


def without(table: Table, rank: int) -> Table:
    """Zero at the `rank`-th most likely token (0 = the most likely), as a cut-off or a mask leaves it."""

    def cut(history: History) -> torch.Tensor:
        probs = table(history).clone()
        probs[probs.argsort(descending=True)[rank]] = 0
        return probs / probs.sum()

    return cache(cut)


def lookup(vocab_size: int) -> Table:
    """One-hot at the token that followed the last one when it was last seen (else at the next id): an n-gram draft."""

    def guess(history: History) -> torch.Tensor:
        last = history[-1] if history else 0
        followers = [b for a, b in itertools.pairwise(history) if a == last]
        return one_hot(followers[-1] if followers else (last + 1) % vocab_size, vocab_size)

    return cache(guess)


def one_hot(token_id: int, vocab_size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token_id), vocab_size).double()


def stacked(target: Table) -> TargetRows:
    """Row i sees the committed tokens and the first i drafts."""
    return lambda history, drafts: torch.stack([target(history + drafts[:i]) for i in range(len(drafts) + 1)])


def draft_paths(draft: Table, history: History, draft_len: int) -> Iterator[tuple[float, History, torch.Tensor]]:
    """Every run of draft tokens that can be drawn: its probability, the tokens, their draft_probs [k, V]."""
    paths: list[tuple[float, History, list[torch.Tensor]]] = [(1.0, (), [])]
    for _ in range(draft_len):
        paths = [
            (weight * prob, (*drafts, token), [*rows, probs])
            for weight, drafts, rows in paths
            for probs in [draft(history + drafts)]
            for token, prob in enumerate(probs.tolist())
            if prob > 0
        ]
    for weight, drafts, rows in paths:
        yield weight, drafts, torch.stack(rows) if rows else torch.empty(0, 1, dtype=torch.float64)


def threshold(
    holds: Callable[[float], bool], low: float = 0.0, high: float = ALMOST_ONE, guess: float | None = None
) -> float:
    """Where a condition that holds for small x, and not for large x, ends; `low` if it never holds.

    guess: where it may end. It is not believed: the condition must hold just below it, and not just above.
    """
    if not holds(low):
        return low
    if holds(high):
        return high
    if guess is not None and low < guess - CLOSE and guess + CLOSE < high:
        if not holds(guess - CLOSE):
            high = guess - CLOSE
        elif holds(guess + CLOSE):
            low = guess + CLOSE
        else:
            return guess
    for _ in range(44):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def categories(draw_token: Callable[[float], int], guess: torch.Tensor) -> list[float]:
    """Probability of each token of a function of one uniform draw that is monotone in the id. guess: see threshold."""
    guesses = guess.double().cumsum(0).tolist()[:-1]
    edges = [threshold(lambda u, v=v: draw_token(u) <= v, guess=x) for v, x in enumerate(guesses)]  # type: ignore[misc]
    edges = [0.0, *edges, 1.0]
    for token, (low, high) in enumerate(itertools.pairwise(edges)):
        assert high - low < 1e-9 or draw_token((low + high) / 2) == token, "not a monotone function of the draw"
    return [high - low for low, high in itertools.pairwise(edges)]


def accept_probability(
    rule: Rule, target_probs: torch.Tensor, draft_probs: torch.Tensor, drafts: History, i: int
) -> float:
    """Probability that draft token i stands, when all before it do."""
    k = len(drafts)

    def stands(u: float) -> bool:
        draws = [0.0] * k  # the smallest draw accepts whatever can be accepted
        draws[i] = u
        return rule(target_probs, draft_probs, drafts, draws, [0.5] * (k + 1)).num_accepted > i

    guess = float(target_probs[i, drafts[i]]) / float(draft_probs[i, drafts[i]])
    edge = threshold(stands, guess=guess)
    return 1.0 if edge == ALMOST_ONE else edge


def round_law(rule: Rule, target_probs: torch.Tensor, draft_probs: torch.Tensor, drafts: History) -> Law:
    """Law of the token_ids of one round with these drafts."""
    k = len(drafts)
    law: Law = {}
    reached = 1.0
    for i in range(k + 1):
        stands = accept_probability(rule, target_probs, draft_probs, drafts, i) if i < k else 0.0
        if reached * (1 - stands) > 0:

            def last_token(u: float, i: int = i) -> int:
                accept = [0.0] * i + [ALMOST_ONE] * (k - i)
                sample = [0.5] * (k + 1)
                sample[i] = u
                out = rule(target_probs, draft_probs, drafts, accept, sample)
                assert out.num_accepted == i
                assert out.token_ids[:i] == drafts[:i]
                assert len(out.token_ids) == i + 1
                return out.token_ids[i]

            excess = (target_probs[i] - draft_probs[i]).clamp(min=0) if i < k else target_probs[i]
            for token, prob in enumerate(categories(last_token, excess / excess.sum())):
                output = (*drafts[:i], token)
                law[output] = reached * (1 - stands) * prob
        reached *= stands
    return law


def joint_law(rule: Rule, target: TargetRows, draft: Table, draft_len: int, length: int) -> Law:
    """Law of the first `length` output tokens over as many rounds as they take."""
    mass: Law = {(): 1.0}
    for done in range(length):
        for history in [h for h in mass if len(h) == done]:
            weight = mass.pop(history)
            for prob, drafts, draft_probs in draft_paths(draft, history, draft_len):
                for tokens, share in round_law(rule, target(history, drafts), draft_probs, drafts).items():
                    output = (*history, *tokens)[:length]
                    mass[output] = mass.get(output, 0.0) + weight * prob * share
    return mass


def plain_law(target: Table, length: int) -> Law:
    """Law of `length` tokens of the target alone, one after the other."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {(*h, t): w * p for h, w in law.items() for t, p in enumerate(target(h).tolist())}
    return law


def distance(first: Law, second: Law) -> float:
    """Largest difference of a probability."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


def total_variation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().sum()) / 2


def tanh_sinh(function: Callable[[float], float], step: float = 1 / 6, reach: float = 3.2) -> float:
    """Integral over (0, 1) of a function that is smooth inside; it is given the logit s of the point 1 / (1 + exp(-s)).

    Source: Takahasi and Mori 1974, "Double exponential formulas for numerical integration".
    """
    total = 0.0
    for i in range(-round(reach / step), round(reach / step) + 1):
        s = math.pi * math.sinh(i * step)
        weight = math.pi * math.cosh(i * step) / (2 + math.exp(s) + math.exp(-s))  # du/dt = u (1 - u) ds/dt
        total += step * weight * function(s)
    return total
