"""Exact acceptance of draft tokens: the output has the law of the target alone, whatever the drafts are.

Everything here is a pure function of its arguments, the random draws included. V is the vocabulary, k the number of
draft tokens; row i of target_probs is the target's distribution after i accepted draft tokens, row i of draft_probs the
very distribution that draft token i was drawn from. Comparisons and sums are in float64 whatever the tables are, so
"exact" means: up to the rounding of the tables themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_AT_ONCE = 2**15  # entries
Row = NDArray[np.floating[Any]]  # probabilities [V] on the host


@dataclass(slots=True)  # not frozen, which would make it several times as slow to make
class VerifyOutput:
    """Outcome of one round for one request: the accepted draft tokens and exactly one recovered or bonus token."""

    num_accepted: int
    token_ids: tuple[int, ...]  # num_accepted + 1 of them


def rejection_sample_all(
    target_probs: torch.Tensor,  # [N, V], k + 1 rows of each of B requests
    draft_row: Callable[[int, int], torch.Tensor],  # draft_probs [V] of a request's draft token number i
    token_probs: Sequence[float],  # [M] what they give each draft token, M = N - B
    draft_token_ids: Sequence[Sequence[int]],  # [B] of [k]
    accept_draws: NDArray[np.float64],  # [M]
    sample_draws: NDArray[np.float64],  # [N]
) -> list[VerifyOutput]:
    """Accept each draft token with probability min(1, target / draft); recover the first rejected from the residual.

    Accepts a draft token with probability 1 - TV(target, draft), the highest possible. Source: Leviathan et al. 2023
    (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
    """
    target = _on_host(target_probs)
    counts = np.array([len(token_ids) for token_ids in draft_token_ids])
    tokens = np.array(list(itertools.chain.from_iterable(draft_token_ids)), dtype=np.int64)  # [M]
    rows = np.arange(len(tokens)) + np.arange(len(counts)).repeat(counts)  # [M] the target row of each
    stands = accepts(target[rows, tokens], np.asarray(token_probs), accept_draws).tolist()
    num_accepted = [
        _num_leading(stands[stop - count : stop]) for stop, count in zip(counts.cumsum(), counts, strict=True)
    ]
    last = (counts + 1).cumsum() - (counts + 1) + num_accepted  # [B] the row that the last token comes from
    chosen: list[int] = []
    for part in _parts(target.shape[1], len(last)):
        rows = target[last[part]].astype(np.float64)
        refused = [b for b in range(len(last))[part] if num_accepted[b] < counts[b]]
        if refused:
            drafted = np.stack([_on_host(draft_row(b, num_accepted[b])) for b in refused])
            at = np.array(refused) - part.start
            rows[at] = residual(rows[at], drafted)
        chosen += sample_all(torch.from_numpy(rows), sample_draws[last[part]])
    return [
        VerifyOutput(count, (*token_ids[:count], token))
        for count, token_ids, token in zip(num_accepted, draft_token_ids, chosen, strict=True)
    ]


def accepts(target_prob: Row, draft_prob: Row, draw: Row) -> NDArray[np.bool_]:
    """Whether draft tokens stand, [M]. Strict, so that no draw accepts a token of target probability 0."""
    assert (draft_prob > 0).all(), "a draft token that its own draft_probs exclude"
    stands: NDArray[np.bool_] = draw * draft_prob < target_prob
    return stands


def residual(target_probs: Row, draft_probs: Row) -> NDArray[np.float64]:
    """max(target - draft, 0), [R, V], unnormalised: the distributions of recovered tokens.

    Without rounding it is empty only if both rows are equal, and then nothing is ever rejected. With rounding, rows
    that differ by their last bits may reject (with a probability of that size) and leave nothing above the draft; the
    target's own row then differs from the right distribution by no more than that rounding, and has no token that it
    excludes.
    """
    excess = np.subtract(target_probs, draft_probs, dtype=np.float64)
    np.maximum(excess, 0, out=excess)
    return np.where(excess.any(axis=-1, keepdims=True), excess, target_probs)


def greedy_sample(best: Sequence[int], draft_token_ids: Sequence[int]) -> VerifyOutput:
    """The target's arg-max tokens [k + 1], for as long as the draft foresaw them: both rules for one-hot rows."""
    num_accepted = 0
    for best_id, token_id in zip(best, draft_token_ids, strict=False):
        if best_id != token_id:
            break
        num_accepted += 1
    return VerifyOutput(num_accepted, tuple(best[: num_accepted + 1]))


def coupled_sample_all(
    target_probs: torch.Tensor,  # [N, V], k + 1 rows of each of B requests
    draft_token_ids: Sequence[Sequence[int]],  # [B] of [k]
    noise: Callable[[Sequence[int], int], torch.Tensor],  # of these requests at their row i, [R, V]
) -> list[VerifyOutput]:
    """The target's own tokens under `noise`, for as long as the draft foresaw them: token for token plain decoding.

    Noise is standard Gumbel, of the position of each row, and is asked for only as far as drafts were foreseen. A draft
    that took the arg-max under the same noise is accepted with probability at least (1 - TV) / (1 + TV). Source: Daliri
    et al. 2024 (arXiv 2408.07978), "Coupling without communication and drafter-invariant speculative decoding".
    """
    foreseen = [(*token_ids, None) for token_ids in draft_token_ids]
    behind = np.cumsum([len(row) for row in foreseen])
    firsts = behind - [len(row) for row in foreseen]  # [B] each request's first row
    chosen: list[list[int]] = [[] for _ in foreseen]
    going = list(range(len(foreseen)))
    for i in itertools.count():
        rows = target_probs[torch.from_numpy(firsts[going] + i)]
        drawn = list(zip(going, sample_gumbel_all(rows, noise(going, i)), strict=True))
        for b, token_id in drawn:
            chosen[b].append(token_id)
        going = [b for b, token_id in drawn if foreseen[b][i] == token_id]
        if not going:
            break
    return [VerifyOutput(len(token_ids) - 1, tuple(token_ids)) for token_ids in chosen]


def sample_all(probs: torch.Tensor, draws: NDArray[np.float64]) -> list[int]:
    """Inverse of the cumulative sum of each row [R, V] at its draw in [0, 1); never a token of probability 0.

    Rows may have any total. On the CPU the sum runs in order of ids and never decreases, which a parallel sum does not
    promise.
    """
    token_ids: list[int] = []
    for part in _parts(probs.shape[1], len(probs)):
        cumulative = probs[part].cpu().double().cumsum(1).numpy()
        totals = cumulative[:, -1]
        assert ((totals > 0) & (totals < np.inf)).all(), "probabilities must be finite and not all zero"
        edges = np.minimum(draws[part] * totals, np.nextafter(totals, 0))  # a product may round up to its total
        token_ids += (cumulative > edges[:, None]).argmax(axis=1).tolist()
    return token_ids


def sample_gumbel_all(probs: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """Arg-max of log(probs) + noise in each row, both [R, V]: draws from `probs` if `noise` is standard Gumbel."""
    scores = probs.double().log().add_(noise.to(probs.device))
    on_cpu = scores.device.type == "cpu"  # where numpy's arg-max is several times as fast as PyTorch's
    best: list[int] = (scores.numpy().argmax(axis=1) if on_cpu else scores.argmax(dim=1)).tolist()
    return best


def one_hot_probs(token_ids: Sequence[int], vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """draft_probs [k, vocab_size] of draft tokens that were not drawn but looked up or chosen for certain."""
    probs = torch.zeros(len(token_ids), vocab_size, dtype=dtype)
    probs[torch.arange(len(token_ids)), torch.as_tensor(list(token_ids), dtype=torch.long)] = 1
    return probs


def _parts(vocab_size: int, num_rows: int) -> Iterator[slice]:
    """Rows that stay in the caches from one operation to the next."""
    step = max(1, _AT_ONCE // vocab_size)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _num_leading(flags: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return flags.index(False) if False in flags else len(flags)


def _on_host(probs: torch.Tensor) -> Row:
    """The same numbers for numpy, whose access to single entries costs next to nothing."""
    rows: Row = (probs if probs.dtype in (torch.float32, torch.float64) else probs.double()).cpu().numpy()
    return rows
