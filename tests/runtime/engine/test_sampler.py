"""Requests that are decided together: as each alone, whoever stands beside it."""

import copy
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from magicdec.errors import RequestError
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.sampler import draw_next, verify, verify_all
from magicdec.runtime.sampling import acceptance as rejection
from magicdec.runtime.sampling.acceptance import VerifyOutput
from magicdec.runtime.sampling.draft import Draft
from tests.support import toy

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "acceptance": "rejection"},
    {"temperature": 1.0, "acceptance": "coupled"},
    {"temperature": 0.7, "top_k": 3, "acceptance": "rejection"},
    {"temperature": 0.7, "top_k": 3, "acceptance": "coupled"},
    {"temperature": 1.0, "min_tokens": 5, "max_tokens": 9},
]


def _batch(seed: int) -> tuple[list[Request], torch.Tensor, list[tuple[int, int]], list[Draft]]:
    """Twelve requests in any order, with drafts of their own draft model, and the target's logits for all."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests = [
        toy.request([rng.randrange(16) for _ in range(rng.randrange(1, 5))], str(i), seed=i, **rng.choice(PARAMS))
        for i in range(12)
    ]
    drafts, counts = [Draft() for _ in requests], [rng.randrange(4) for _ in requests]
    laws = [torch.randn(count + 1, 16, dtype=torch.float64) for count in counts]
    for i in range(max(counts)):
        growing = [index for index in range(12) if counts[index] > i]
        logits = torch.stack([laws[index][i] + torch.randn(16) / 2 for index in growing])
        grown = draw_next([requests[index] for index in growing], logits, [drafts[index] for index in growing])
        assert set(grown) == {None}
    stops = list(itertools.accumulate(count + 1 for count in counts))
    spans = [(stop - count - 1, stop) for stop, count in zip(stops, counts, strict=True)]
    return requests, torch.cat(laws), spans, drafts


def _apart(draft: Draft) -> Draft:
    """The same draft as its request alone would have drawn it, in tables of one row."""
    cut = [
        [table[row].clone()[None] for table, row in zip(tables, draft.table_rows, strict=True)] if tables else []
        for tables in (draft.distributions, draft.noise)
    ]
    return Draft(draft.token_ids, [0] * len(draft.table_rows), cut[0], draft.token_probs, cut[1])


@pytest.mark.parametrize("at_once", [rejection._AT_ONCE, 40])
@pytest.mark.parametrize("seed", range(30))
def test_verified_together_as_alone(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a vocabulary is so large that a batch is worked through in parts."""
    monkeypatch.setattr(rejection, "_AT_ONCE", at_once)
    requests, logits, spans, drafts = _batch(seed)
    together = verify_all(requests, logits, spans, drafts)
    alone = [verify(r, logits[a:b], _apart(d)) for r, (a, b), d in zip(requests, spans, drafts, strict=True)]
    assert together == alone
    assert len({out.num_accepted for out in alone}) > 1


@pytest.mark.parametrize("at_once", [rejection._AT_ONCE, 40])
@pytest.mark.parametrize("seed", range(30))
def test_drafted_together_as_alone(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_AT_ONCE", at_once)
    requests, _, _, drafts = _batch(seed)
    together, alone, logits = copy.deepcopy(drafts), copy.deepcopy(drafts), torch.randn(12, 16)
    assert draw_next(requests, logits, together) == [None] * 12
    for i, request in enumerate(requests):
        assert draw_next([request], logits[i : i + 1], [alone[i]]) == [None]
        assert together[i].token_ids == alone[i].token_ids
        assert together[i].token_ids[:-1] == drafts[i].token_ids
        assert bool(together[i].distributions) != request.params.greedy
        laws = together[i].rows(16)
        assert torch.equal(laws, alone[i].rows(16))
        if request.params.acceptance_rule == "rejection":
            assert (
                together[i].drawn_probs() == laws[torch.arange(len(laws)), torch.tensor(together[i].token_ids)].tolist()
            )


@pytest.mark.parametrize("seed", range(10))
def test_noise_that_drafts_were_drawn_with_is_that_of_verification(seed: int) -> None:
    """Verified with what is kept and with what is drawn anew, for drafts of several lengths that grew together."""
    torch.manual_seed(seed)
    requests = [toy.request([1, 2], str(i), seed=i, temperature=1.0, acceptance="coupled") for i in range(9)]
    drafts = [Draft() for _ in requests]
    for count in range(3):
        growing = [i for i in range(9) if i % 4 >= count]
        logits = torch.randn(len(growing), 16)
        assert set(draw_next([requests[i] for i in growing], logits, [drafts[i] for i in growing])) == {None}
    lengths = [len(draft.token_ids) + 1 for draft in drafts]
    stops = list(itertools.accumulate(lengths))
    spans = [(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]
    logits = torch.randn(stops[-1], 16)
    kept = verify_all(requests, logits, spans, drafts)
    assert all(len(draft.noise) == len(draft.token_ids) for draft in drafts)
    anew = verify_all(requests, logits, spans, [replace(draft, noise=[]) for draft in drafts])
    assert kept == anew


@pytest.mark.parametrize("bad", range(12))
def test_an_unreadable_row_is_the_error_of_one_request(bad: int) -> None:
    requests, logits, spans, drafts = _batch(3)
    right = verify_all(requests, logits, spans, drafts)
    logits[spans[bad][0], 5] = torch.nan
    for i, (out, wanted) in enumerate(zip(verify_all(requests, logits, spans, drafts), right, strict=True)):
        assert isinstance(out, RequestError) if i == bad else out == wanted


def test_no_draft_is_looked_at_behind_the_first_rejected_one() -> None:
    """A row that is unreadable behind it is nobody's error."""
    request = toy.request([1], temperature=0)
    logits = torch.zeros(3, 16)
    logits[0, 4] = 1
    logits[1:] = torch.nan
    assert verify_all([request], logits, [(0, 3)], [Draft([2, 3])]) == [VerifyOutput(0, (4,))]
