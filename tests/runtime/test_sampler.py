"""Requests that are decided together: as each alone, whoever stands beside it."""

import random
from typing import Any

import pytest
import torch

from magicdec.errors import RequestError
from magicdec.runtime import sampler
from magicdec.runtime.draft import Draft
from magicdec.runtime.rejection import VerifyOutput
from magicdec.runtime.request import Request
from magicdec.runtime.sampler import sample_draft_tokens, verify, verify_all
from tests import toy

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
    drafts: list[Draft] = []
    spans: list[tuple[int, int]] = []
    rows: list[torch.Tensor] = []
    for request in requests:
        count = rng.randrange(4)
        law = torch.randn(count + 1, 16, dtype=torch.float64)
        tokens: list[int] = []
        laws: list[torch.Tensor] = []
        for i in range(count):
            (token,) = sample_draft_tokens([request], (law[i] + torch.randn(16) / 2)[None], [tokens])
            assert not isinstance(token, RequestError)
            tokens.append(token.token_id)
            laws += [] if token.probs is None else [token.probs]
        drafts.append(Draft(tokens, laws or None))
        spans.append((len(rows), len(rows) + count + 1))
        rows += list(law)
    return requests, torch.stack(rows), spans, drafts


@pytest.mark.parametrize("seed", range(30))
def test_verified_together_as_alone(seed: int) -> None:
    requests, logits, spans, drafts = _batch(seed)
    together = verify_all(requests, logits, spans, drafts)
    alone = [verify(r, logits[a:b], d) for r, (a, b), d in zip(requests, spans, drafts, strict=True)]
    assert together == alone
    assert len({out.num_accepted for out in alone}) > 1


@pytest.mark.parametrize("seed", range(30))
def test_drafted_together_as_alone(seed: int) -> None:
    requests, _, _, drafts = _batch(seed)
    tokens, logits = [draft.token_ids for draft in drafts], torch.randn(12, 16)
    together = sample_draft_tokens(requests, logits, tokens)
    for i, token in enumerate(together):
        (alone,) = sample_draft_tokens([requests[i]], logits[i : i + 1], [tokens[i]])
        assert isinstance(token, sampler.DraftToken)
        assert isinstance(alone, sampler.DraftToken)
        assert token.token_id == alone.token_id
        assert (token.probs is None) == (alone.probs is None) == requests[i].params.greedy
        if token.probs is not None and alone.probs is not None:
            assert torch.equal(token.probs, alone.probs)
            assert token.prob == alone.prob == float(token.probs[token.token_id])


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
    assert verify_all([request], logits, [(0, 3)], [Draft([2, 3], None)]) == [VerifyOutput(0, (4,))]
