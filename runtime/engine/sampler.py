"""Chooses tokens from logits for the requests of a step: draft tokens, and what verification makes of them.

Every draw is keyed by (seed, position of the token to be chosen, purpose). The token that is committed at a position
depends on the draws of that position alone, so draws of drafts that were thrown away may be used again.

Requests whose rows are processed alike, whatever their history, share the operations over the vocabulary; no row's
result depends on the rows beside it. Greedy requests need one arg-max, and no distribution at all.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from magicdec.errors import RequestError
from magicdec.runtime.engine.request import Request
from magicdec.runtime.sampling.acceptance import (
    VerifyOutput,
    coupled_sample_all,
    greedy_sample,
    rejection_sample_all,
    sample_all,
    sample_gumbel_all,
)
from magicdec.runtime.sampling.draft import Draft
from magicdec.runtime.sampling.draws import Purpose, Words, gumbels, uniforms

T = TypeVar("T")
Span = tuple[int, int]  # first row, and the row behind the last one


def draw_next(
    requests: Sequence[Request],
    logits: torch.Tensor,  # [B, V], after the committed tokens and the drafts so far
    drafts: Sequence[Draft],  # [B], each of which gets one more token
) -> list[RequestError | None]:
    """Grow each draft, or say why it does not."""

    def decide(indices: Sequence[int]) -> list[None]:
        first, history = requests[indices[0]], drafts[indices[0]].token_ids
        rows = logits if len(indices) == len(requests) else logits[torch.tensor(indices)]
        grown = [drafts[i] for i in indices]
        if first.params.greedy:
            best = first.logits_processor.best(rows, history, first=len(history))
            for draft, token_id in zip(grown, best, strict=True):
                draft.token_ids.append(token_id)
        else:
            probs = first.logits_processor.probs(rows, history, first=len(history))  # [len(indices), V]
            _draw([requests[i] for i in indices], grown, probs)
        return [None] * len(indices)

    return _by_distribution(requests, decide)


def verify(request: Request, logits: torch.Tensor, draft: Draft) -> VerifyOutput:
    """Accept a prefix of the draft, exactly, and choose one more token. logits: [k + 1, V], k = drafts, may be 0."""
    return _verify_alike([request], logits, [draft])[0]


def verify_all(
    requests: Sequence[Request], logits: torch.Tensor, spans: Sequence[Span], drafts: Sequence[Draft]
) -> list[VerifyOutput | RequestError]:
    """`verify` for each request, whose rows of logits [N, V] are those of its span; an error is of one request alone.

    A row that is NaN or infinite is an error only where plain decoding would come to it: drafts may lead the target
    where it has no distribution. The rows before decide whether the output goes there; if so, the next step begins
    with it.
    """

    def decide(indices: Sequence[int]) -> list[VerifyOutput]:
        rows = _rows(logits, [spans[i] for i in indices])
        asked, drafted = [requests[i] for i in indices], [drafts[i] for i in indices]
        return (
            _verify_alike(asked, rows, drafted) if len(indices) > 1 else [_verify_readable(asked[0], rows, drafted[0])]
        )

    return _by_distribution(requests, decide)


def _by_distribution(requests: Sequence[Request], decide: Callable[[Sequence[int]], list[T]]) -> list[T | RequestError]:
    """Decide together those whose distributions are made alike; each alone where one of them cannot be decided."""
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.logits_processor.distribution_key or index, []).append(index)
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
    """Requests with one `distribution_key`, or one alone. logits [N, V]: k + 1 rows of each request, in order."""
    first, history = requests[0], drafts[0].token_ids
    stops = [0, *itertools.accumulate(len(draft.token_ids) + 1 for draft in drafts)]
    if first.params.greedy:
        best = first.logits_processor.best(logits, history)
        pairs = zip(itertools.pairwise(stops), drafts, strict=True)
        return [greedy_sample(best[start:stop], draft.token_ids) for (start, stop), draft in pairs]
    probs = first.logits_processor.probs(logits, history)  # [N, V]
    token_ids = [draft.token_ids for draft in drafts]
    seeds, starts = _seeds(requests), np.array([len(request.token_ids) for request in requests], dtype=np.uint64)
    if first.params.acceptance_rule == "coupled":

        def noise(going: Sequence[int], i: int) -> torch.Tensor:
            drawn = _drawn_noise([drafts[b] for b in going], i)
            return gumbels(seeds[going], starts[going] + np.uint64(i), probs.shape[1]) if drawn is None else drawn

        return coupled_sample_all(probs, token_ids, noise)
    counts = np.array([len(each) for each in token_ids])
    return rejection_sample_all(
        probs,
        lambda b, i: drafts[b].row(i, probs.shape[1]),
        [prob for draft in drafts for prob in draft.drawn_probs()],
        token_ids,
        _runs(seeds, starts, counts, Purpose.ACCEPT),
        _runs(seeds, starts, counts + 1, Purpose.SAMPLE),
    )


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


def _draw(requests: Sequence[Request], drafts: Sequence[Draft], probs: torch.Tensor) -> None:
    """A token for each draft from its row of probs [R, V]; all requests have one rule."""
    seeds = _seeds(requests)
    lengths = [len(request.token_ids) + len(draft.token_ids) for request, draft in zip(requests, drafts, strict=True)]
    positions = np.array(lengths, dtype=np.uint64)
    if requests[0].params.acceptance_rule == "coupled":
        noise = gumbels(seeds, positions, probs.shape[1])
        token_ids = sample_gumbel_all(probs, noise)
        for draft in drafts:
            draft.noise.append(noise)
    else:
        token_ids = sample_all(probs, uniforms(seeds, positions, Purpose.DRAFT))
        drawn = probs.gather(1, torch.tensor(token_ids, device=probs.device)[:, None]).flatten().tolist()
        for draft, prob in zip(drafts, drawn, strict=True):
            draft.token_probs.append(prob)
    for row, (draft, token_id) in enumerate(zip(drafts, token_ids, strict=True)):
        draft.token_ids.append(token_id)
        draft.table_rows.append(row)
        draft.distributions.append(probs)


def _drawn_noise(drafts: Sequence[Draft], i: int) -> torch.Tensor | None:
    """The noise [R, V] that the drafts' tokens number i were drawn with, where they were drawn together."""
    tables = [draft.noise[i] for draft in drafts if i < len(draft.noise)]
    if len(tables) < len(drafts) or len(set(map(id, tables))) > 1:
        return None
    table, rows = tables[0], [draft.table_rows[i] for draft in drafts]
    return table if rows == list(range(len(table))) else table[rows]


def _runs(seeds: Words, starts: Words, counts: NDArray[np.int64], purpose: Purpose) -> NDArray[np.float64]:
    """Draws of `count` positions from `start` on, one request after the other."""
    behind = counts.cumsum()
    offsets = np.arange(behind[-1]) - (behind - counts).repeat(counts)
    return uniforms(seeds.repeat(counts), starts.repeat(counts) + offsets.astype(np.uint64), purpose)


def _seeds(requests: Sequence[Request]) -> Words:
    return np.array([request.seed for request in requests], dtype=np.uint64)
