"""The definition of the fused acceptance: its tokens against `runtime.rejection` over a softmax."""

import math

import numpy as np
import pytest
import torch

from magicdec.plugins import acceptance
from magicdec.plugins.acceptance import AcceptanceRequest, Outcome, Rule
from tests.plugins.acceptance_cases import Batch, random_batch
from tests.support.one_request import coupled_sample, gumbel, rejection_sample

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def expected(batch: Batch) -> list[Outcome | None]:
    """`runtime.rejection` over float64 softmaxes of the same logits."""
    outcomes: list[Outcome | None] = []
    row = 0
    for index, request in enumerate(batch.requests):
        k = len(request.draft_token_ids)
        logits = batch.logits[row : row + k + 1].double()
        drafts = batch.draft_probs[row - index : row - index + k]
        outcomes.append(_outcome(request, logits, drafts))
        row += k + 1
    return outcomes


def _outcome(request: AcceptanceRequest, logits: torch.Tensor, drafts: torch.Tensor) -> Outcome:
    probs = (logits / request.temperature).softmax(-1)
    if request.rule is Rule.COUPLED:
        noise = torch.stack([gumbel(request.seed, request.position + i, probs.shape[1]) for i in range(len(probs))])
        out = coupled_sample(probs, request.draft_token_ids, noise)
    else:
        if request.rule is Rule.GREEDY:
            probs = torch.nn.functional.one_hot(logits.argmax(-1), probs.shape[1]).double()
        draws = request.accept_draws, request.sample_draws
        out = rejection_sample(probs, drafts, request.draft_token_ids, *draws)
    return Outcome(out.num_accepted, out.token_ids[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "block_size"), [(3, 16), (16, 16), (50, 16), (130, 64), (1000, 256)])
def test_tokens_are_those_of_rejection_over_a_softmax(vocab_size: int, block_size: int, dtype: torch.dtype) -> None:
    batch = random_batch(np.random.default_rng(vocab_size), 200, vocab_size, dtype)
    got = acceptance.accept(batch.logits, batch.draft_probs, batch.requests, gumbel, block_size)
    assert got == expected(batch)
    counts = {outcome.num_accepted for outcome in got if outcome is not None}
    assert counts == {0, 1, 2, 3, 4}


def test_a_real_vocabulary() -> None:
    batch = random_batch(np.random.default_rng(0), 6, 128_256, torch.bfloat16)
    assert acceptance.accept(batch.logits, batch.draft_probs, batch.requests, gumbel) == expected(batch)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3, 1, 3]])
    outcome = acceptance.accept(logits, torch.empty(0, 4), [AcceptanceRequest(Rule.GREEDY, [])], gumbel, 16)
    assert outcome == [Outcome(0, 1)]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unreadable_rows_are_refused_where_they_are_reached(rule: Rule, bad: float) -> None:
    def decide(draft: int) -> Outcome | None:
        logits = torch.full((2, 20), -50.0)
        logits[0, 17], logits[1, 18] = 50, bad
        probs = torch.nn.functional.one_hot(torch.tensor([draft]), 20).float()
        request = AcceptanceRequest(rule, [draft], 1.0, [0.5], [0.5, 0.5])
        return acceptance.accept(logits, probs, [request], gumbel, 16)[0]

    assert decide(17) is None
    assert decide(3) == Outcome(0, 17)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_row_without_any_token_is_refused(rule: Rule) -> None:
    request = AcceptanceRequest(rule, [], 1.0, [], [0.5])
    assert acceptance.accept(torch.full((1, 20), -math.inf), torch.empty(0, 20), [request], gumbel, 16) == [None]


def test_nothing_over_the_draft_falls_back_to_the_target() -> None:
    """A draft that is nowhere below the target, and yet rejects: only rounding makes such rows."""
    probs = torch.tensor([[0.6, 0.6]])
    request = AcceptanceRequest(Rule.REJECTION, [0], 1.0, [0.99], [0.75, 0.5])
    assert acceptance.accept(torch.zeros(2, 2), probs, [request], gumbel, 16) == [Outcome(0, 1)]


def test_largest_logits_do_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[-largest, largest, -largest, 0.0]])
    request = AcceptanceRequest(Rule.REJECTION, [], 1e-5, [], [0.999])
    assert acceptance.accept(logits, torch.empty(0, 4), [request], gumbel, 16) == [Outcome(0, 1)]
