"""Exact acceptance of draft tokens: the output has the law of the target alone, whatever the drafts are.

Everything here is a pure function of its arguments, the random draws included. V is the vocabulary, k the number of
draft tokens; row i of target_probs is the target's distribution after i accepted draft tokens, row i of draft_probs the
very distribution that draft token i was drawn from. Comparisons and sums are in float64 whatever the tables are, so
"exact" means: up to the rounding of the tables themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.floating[Any]]  # probabilities [V] on the host


@dataclass(frozen=True)
class VerifyOutput:
    """Outcome of one round for one request: the accepted draft tokens and exactly one recovered or bonus token."""

    num_accepted: int
    token_ids: tuple[int, ...]  # num_accepted + 1 of them


def rejection_sample(
    target_probs: torch.Tensor,  # [k + 1, V]
    draft_probs: Sequence[torch.Tensor] | torch.Tensor,  # [k, V]
    draft_token_ids: Sequence[int],  # [k]
    accept_draws: Sequence[float],  # [k], in [0, 1)
    sample_draws: Sequence[float],  # [k + 1], in [0, 1): the recovered token at i, or the bonus token
) -> VerifyOutput:
    """Accept each draft token with probability min(1, target / draft); recover the first rejected from the residual.

    Accepts a draft token with probability 1 - TV(target, draft), the highest possible. Source: Leviathan et al. 2023
    (arXiv 2211.17192), algorithm 1; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.
    """
    num_drafts = len(draft_token_ids)
    assert target_probs.shape[0] == num_drafts + 1 == len(sample_draws), "one target row and sample draw a token"
    assert len(draft_probs) == num_drafts == len(accept_draws), "one draft row and accept draw a draft token"
    draft_rows = [_on_host(row) for row in draft_probs]
    return _first_rejected(_on_host(target_probs), draft_rows, draft_token_ids, accept_draws, sample_draws)


def _first_rejected(
    target_probs: Row,
    draft_probs: Sequence[Row],
    draft_token_ids: Sequence[int],
    accept_draws: Sequence[float],
    sample_draws: Sequence[float],
) -> VerifyOutput:
    num_drafts = len(draft_token_ids)
    for i, token_id in enumerate(draft_token_ids):
        if not accepts(target_probs[i], draft_probs[i], token_id, accept_draws[i]):
            recovered = sample(residual(target_probs[i], draft_probs[i]), sample_draws[i])
            return VerifyOutput(i, (*draft_token_ids[:i], recovered))
    bonus = sample(target_probs[num_drafts], sample_draws[num_drafts])
    return VerifyOutput(num_drafts, (*draft_token_ids, bonus))


def accepts(target_probs: Row, draft_probs: Row, token_id: int, draw: float) -> bool:
    """Whether the draft token stands, for rows [V]. Strict, so that no draw accepts a token of target probability 0."""
    draft_prob = float(draft_probs[token_id])
    assert draft_prob > 0, "a draft token that its own draft_probs exclude"
    return draw * draft_prob < float(target_probs[token_id])


def residual(target_probs: Row, draft_probs: Row) -> NDArray[np.float64]:
    """max(target - draft, 0), [V], unnormalised: the law of a recovered token.

    Without rounding it is empty only if both rows are equal, and then nothing is ever rejected. With rounding, rows
    that differ by their last bits may reject (with a probability of that size) and leave nothing above the draft; the
    target's own row then differs from the right law by no more than that rounding, and has no token it excludes.
    """
    excess = np.subtract(target_probs, draft_probs, dtype=np.float64)
    np.maximum(excess, 0, out=excess)
    return excess if excess.any() else target_probs.astype(np.float64)


def greedy_sample(best: Sequence[int], draft_token_ids: Sequence[int]) -> VerifyOutput:
    """The target's arg-max tokens [k + 1], for as long as the draft foresaw them: both rules for one-hot rows."""
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == best[num_accepted]:
        num_accepted += 1
    return VerifyOutput(num_accepted, tuple(best[: num_accepted + 1]))


def coupled_sample(
    target_probs: torch.Tensor,  # [k + 1, V]
    draft_token_ids: Sequence[int],  # [k]
    noise: Sequence[torch.Tensor] | torch.Tensor,  # [k + 1, V], standard Gumbel, of the position of each row
) -> VerifyOutput:
    """The target's own tokens under `noise`, for as long as the draft foresaw them: token for token plain decoding.

    A draft that took the arg-max under the same noise is accepted with probability at least (1 - TV) / (1 + TV).
    Source: Daliri et al. 2024 (arXiv 2408.07978), "Coupling without communication and drafter-invariant speculative
    decoding".
    """
    num_drafts = len(draft_token_ids)
    assert target_probs.shape[0] == num_drafts + 1 == len(noise), "one target row and one row of noise a token"
    token_ids: list[int] = []
    for i in range(num_drafts + 1):
        token_ids.append(sample_gumbel(target_probs[i], noise[i]))
        if i < num_drafts and token_ids[i] != draft_token_ids[i]:
            break
    return VerifyOutput(len(token_ids) - 1, tuple(token_ids))


def sample(probs: torch.Tensor | Row, draw: float) -> int:
    """Inverse of the cumulative sum at `draw` in [0, 1), for `probs` [V] of any total; never a token of probability 0.

    On the CPU the sum runs in order of ids and never decreases, which a parallel sum does not promise.
    """
    row = torch.from_numpy(probs) if isinstance(probs, np.ndarray) else probs.cpu()
    cumulative = row.double().cumsum(0).numpy()
    total = float(cumulative[-1])
    assert 0 < total < float("inf"), "probabilities must be finite and not all zero"
    last = int(cumulative.searchsorted(total))  # the last token with a share; draw * total may round to total
    return min(int(cumulative.searchsorted(draw * total, side="right")), last)


def sample_gumbel(probs: torch.Tensor, noise: torch.Tensor) -> int:
    """Arg-max of log(probs) + noise, both [V]: a draw from `probs` if `noise` is standard Gumbel."""
    return int((probs.double().log() + noise.to(probs.device)).argmax())


def one_hot_probs(token_ids: Sequence[int], vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """draft_probs [k, vocab_size] of draft tokens that were not drawn but looked up or chosen for certain."""
    probs = torch.zeros(len(token_ids), vocab_size, dtype=dtype)
    probs[torch.arange(len(token_ids)), torch.as_tensor(list(token_ids), dtype=torch.long)] = 1
    return probs


def _on_host(probs: torch.Tensor) -> Row:
    """The same numbers for numpy, whose access to single entries costs next to nothing."""
    rows: Row = (probs if probs.dtype in (torch.float32, torch.float64) else probs.double()).cpu().numpy()
    return rows
