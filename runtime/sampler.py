"""Chooses tokens from logits for the requests of a step: draft tokens, and what verification makes of them.

Every draw is keyed by (seed, position of the token to be chosen, purpose). The token that is committed at a position
depends on the draws of that position alone, so draws of drafts that were thrown away may be used again.

Requests whose rows are processed alike, whatever their history, share the operations over the vocabulary; no row's
result depends on the rows beside it. Greedy requests need one arg-max, and no distribution at all.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from magicdec.errors import RequestError
from magicdec.runtime.draft import Draft
from magicdec.runtime.draws import DrawKey, GumbelRows, Purpose, gumbel, uniforms
from magicdec.runtime.rejection import (
    VerifyOutput,
    coupled_sample,
    greedy_sample,
    rejection_sample,
    sample,
    sample_gumbel,
)
from magicdec.runtime.request import Request

T = TypeVar("T")
Span = tuple[int, int]  # first row, and the row behind the last one


@dataclass(frozen=True)
class DraftToken:
    """A draft token, and the very distribution [V] that it was drawn from; None: it is the arg-max."""

    token_id: int
    probs: torch.Tensor | None


def draft_draws(requests: Sequence[Request], counts: Sequence[int]) -> list[list[float]]:
    """For each request the draws of its next `count` draft tokens; none where another rule chooses them."""
    return _draw_all([_keys(each, Purpose.DRAFT, count) for each, count in zip(requests, counts, strict=True)])


def sample_draft_tokens(
    requests: Sequence[Request],
    logits: torch.Tensor,  # [B, V], after the committed tokens and the drafts so far
    drafts: Sequence[list[int]],  # [B] draft tokens so far
    draws: Sequence[list[float]],  # [B] from `draft_draws`
) -> list[DraftToken | RequestError]:
    """One more draft token for each request, or why it gets none."""

    def decide(indices: Sequence[int]) -> list[DraftToken]:
        first, history = requests[indices[0]], drafts[indices[0]]
        rows = _rows(logits, [(i, i + 1) for i in indices])
        if first.params.greedy:
            return [DraftToken(best, None) for best in first.logits_processor.best(rows, history, first=len(history))]
        probs = first.logits_processor.probs(rows, history, first=len(history))  # [len(indices), V]
        return [_draft_token(requests[i], law, drafts[i], draws[i]) for i, law in zip(indices, probs, strict=True)]

    return _by_law(requests, decide)


def verify(request: Request, logits: torch.Tensor, draft: Draft) -> VerifyOutput:
    """Accept a prefix of the draft, exactly, and choose one more token. logits: [k + 1, V], k = drafts, may be 0."""
    return _verify_alike([request], logits, [draft])[0]


def verify_all(
    requests: Sequence[Request], logits: torch.Tensor, spans: Sequence[Span], drafts: Sequence[Draft]
) -> list[VerifyOutput | RequestError]:
    """`verify` for each request, whose rows of logits [N, V] are those of its span; an error is of one request alone.

    A row that is NaN or infinite is an error only where plain decoding would come to it: drafts may lead the target
    where it has no law. The rows before decide whether the output goes there; if so, the next step begins with it.
    """

    def decide(indices: Sequence[int]) -> list[VerifyOutput]:
        rows = _rows(logits, [spans[i] for i in indices])
        asked, drafted = [requests[i] for i in indices], [drafts[i] for i in indices]
        return (
            _verify_alike(asked, rows, drafted) if len(indices) > 1 else [_verify_readable(asked[0], rows, drafted[0])]
        )

    return _by_law(requests, decide)


def _by_law(requests: Sequence[Request], decide: Callable[[Sequence[int]], list[T]]) -> list[T | RequestError]:
    """Decide together those whose laws are made alike; each alone where one of them cannot be decided."""
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.logits_processor.shared_law or index, []).append(index)
    results: dict[int, T | RequestError] = {}
    waiting = list(groups.values())
    while waiting:
        group = waiting.pop()
        try:
            results.update(zip(group, decide(group), strict=True))
        except RequestError as error:
            if len(group) == 1:
                results[group[0]] = error
            else:
                waiting += [[index] for index in group]
    return [results[index] for index in range(len(requests))]


def _rows(logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The rows of these spans, one after the other; a view if they are neighbours."""
    if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
        return logits[spans[0][0] : spans[-1][1]]
    return torch.cat([logits[start:stop] for start, stop in spans])


def _verify_alike(requests: Sequence[Request], logits: torch.Tensor, drafts: Sequence[Draft]) -> list[VerifyOutput]:
    """Requests that share a law, or one alone. logits [N, V]: k + 1 rows of each, one request after the other."""
    first, history = requests[0], drafts[0].token_ids
    stops = [0, *itertools.accumulate(len(draft.token_ids) + 1 for draft in drafts)]
    if first.params.greedy:
        best = first.logits_processor.best(logits, history)
        pairs = zip(itertools.pairwise(stops), drafts, strict=True)
        return [greedy_sample(best[start:stop], draft.token_ids) for (start, stop), draft in pairs]
    probs = first.logits_processor.probs(logits, history)  # [N, V]
    keys = [
        (_keys(r, Purpose.ACCEPT, len(d.token_ids)), _keys(r, Purpose.SAMPLE, len(d.token_ids) + 1))
        for r, d in zip(requests, drafts, strict=True)
    ]
    draws = _draw_all(list(itertools.chain.from_iterable(keys)))
    verdicts = []
    for index, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        table = probs[stops[index] : stops[index + 1]]
        if _is_drawn(request):
            laws, (accept, choose) = draft.rows(table), draws[2 * index : 2 * index + 2]
            verdicts.append(rejection_sample(table, laws, draft.token_ids, accept, choose))
        else:
            verdicts.append(_verify_coupled(request, table, draft))
    return verdicts


def _verify_coupled(request: Request, target_probs: torch.Tensor, draft: Draft) -> VerifyOutput:
    """target_probs: [k + 1, V]."""
    noise = GumbelRows(request.seed, len(request.token_ids), *target_probs.shape)  # [k + 1, V]
    return coupled_sample(target_probs, draft.token_ids, noise)


def _verify_readable(request: Request, logits: torch.Tensor, draft: Draft) -> VerifyOutput:
    """`verify`, up to the first row that is NaN or infinite. logits: [k + 1, V]."""
    try:
        return verify(request, logits, draft)
    except RequestError:
        unreadable = (~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist()  # NaN wins any maximum
        if not unreadable or unreadable[0] == 0:
            raise
    bad = unreadable[0]
    rows = logits[: bad + 1].clone()
    rows[bad] = 0
    verdict = verify(request, rows, draft.first(bad))
    return verdict if verdict.num_accepted < bad else VerifyOutput(bad - 1, verdict.token_ids[:bad])


def _draft_token(request: Request, probs: torch.Tensor, drafts: list[int], draws: list[float]) -> DraftToken:
    """probs: [V], after `drafts`."""
    if _is_drawn(request):
        return DraftToken(sample(probs, draws[len(drafts)]), probs)
    position = len(request.token_ids) + len(drafts)
    return DraftToken(sample_gumbel(probs, gumbel(request.seed, position, len(probs))), probs)


def _is_drawn(request: Request) -> bool:
    return not request.params.greedy and request.params.acceptance_rule == "rejection"


def _keys(request: Request, purpose: Purpose, count: int) -> list[DrawKey]:
    """Of the next `count` positions; none if its tokens are chosen by another rule."""
    if not _is_drawn(request):
        return []
    first = len(request.token_ids)
    return [(request.seed, first + i, purpose) for i in range(count)]


def _draw_all(keys: Sequence[list[DrawKey]]) -> list[list[float]]:
    """The draws of all these keys, in the same form."""
    draws = iter(uniforms(list(itertools.chain.from_iterable(keys))))
    return [list(itertools.islice(draws, len(row))) for row in keys]
