"""Acceptance of many requests' draft tokens at once, from logits to tokens, in arithmetic that every device repeats.

The PyTorch reference of `acceptance_kernel`, and the definition of its arithmetic. A token's weight is an integer:
2 ** (logit * log2(e) / temperature), the power of two as a shift, the rest as a polynomial in float64 whose products
and sums are rounded one by one. Integers add up to the same sum in any order, so both sides choose the same token from
the same draws, bit for bit. A weight is cut at 2 ** -44 of the largest in its row; a distribution thus differs from
that of a softmax by less than float32 rounds.

The vocabulary V is read in blocks. One pass gives the largest exponent and the sum of each, enough to accept, to
reject, and to find the block of a bonus token. Only a rejected row is read again, for max(target - draft, 0).

Gumbel noise (the coupled rule) goes through a logarithm, whose last bits devices do not share: there, tokens may differ
where two of them score the same within 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

BLOCK_SIZE = 1024  # tokens whose weights share an exponent
MAX_VOCAB_SIZE = 2**18  # so that the sum of a row's weights fits 63 bits
WEIGHT_BITS = 44
EXP2_COEFFICIENTS = tuple(math.log(2) ** k / math.factorial(k) for k in range(11))  # Taylor: error 2e-13 within 1/2
NO_EXPONENT = -1e300  # of a token without weight

Noise = Callable[[int, int, int], torch.Tensor]  # (seed, position, V) -> standard Gumbel noise, float64 [V]


class Rule(IntEnum):
    """How draft tokens are accepted; see runtime/sampling/acceptance.py."""

    REJECTION = 0
    GREEDY = 1
    COUPLED = 2


@dataclass(frozen=True)
class AcceptanceRequest:
    """k draft tokens of one request (k may be 0), and all that decides about them."""

    rule: Rule
    draft_token_ids: Sequence[int]  # [k]
    temperature: float = 1.0  # unused by GREEDY
    accept_draws: Sequence[float] = ()  # [k], in [0, 1); REJECTION only
    sample_draws: Sequence[float] = ()  # [k + 1], in [0, 1); REJECTION only
    seed: int = 0  # COUPLED only: row i has the noise of (seed, position + i)
    position: int = 0

    def __post_init__(self) -> None:
        k = len(self.draft_token_ids)
        if self.rule is Rule.REJECTION:
            assert (len(self.accept_draws), len(self.sample_draws)) == (k, k + 1), "k accept and k + 1 sample draws"

    @property
    def scale(self) -> float:
        """Factor from logits to exponents of two."""
        return math.log2(math.e) / (1.0 if self.rule is Rule.GREEDY else self.temperature)


class Outcome(NamedTuple):
    """Accepted draft tokens, and the one token that follows them."""

    num_accepted: int
    token_id: int


def accept(
    logits: torch.Tensor,  # [N, V], N = sum of k + 1, of any floating type: the target's, request by request
    draft_probs: torch.Tensor,  # [M, V], M = sum of k: the very distributions that the draft tokens were drawn from
    requests: Sequence[AcceptanceRequest],
    noise: Noise,
    block_size: int = BLOCK_SIZE,
) -> list[Outcome | None]:
    """Decide each request; None if that comes to a row with NaN or infinity, or without any token.

    Same distribution as that of `runtime.sampling.acceptance` over a softmax of the logits. Rejection: Leviathan et
    al. 2023 (arXiv 2211.17192), algorithm 1. Coupled: Daliri et al. 2024 (arXiv 2408.07978).
    """
    check_shapes(logits, draft_probs, requests)
    outcomes: list[Outcome | None] = []
    row = 0
    for index, request in enumerate(requests):
        k = len(request.draft_token_ids)
        rows = [_Row(logits[row + i], request.scale, block_size) for i in range(k + 1)]
        drafts = draft_probs[row - index : row - index + k].double()
        decide = _reject if request.rule is Rule.REJECTION else _match
        outcomes.append(decide(request, rows, drafts, noise))
        row += k + 1
    return outcomes


def check_shapes(logits: torch.Tensor, draft_probs: torch.Tensor, requests: Sequence[AcceptanceRequest]) -> None:
    """Assert that all rows are there and that a row's sum fits its integer."""
    num_drafts = sum(len(request.draft_token_ids) for request in requests)
    assert logits.shape[0] == num_drafts + len(requests), "a row of logits for each draft token, and one more"
    assert draft_probs.shape == (num_drafts, logits.shape[1]), "a row of draft_probs for each draft token"
    assert 0 < logits.shape[1] <= MAX_VOCAB_SIZE, "vocabulary too large for 63-bit sums"


class _Row:
    """One target row: integer weights in blocks, with the exponent that each block's weights are relative to."""

    def __init__(self, logits: torch.Tensor, scale: float, block_size: int) -> None:
        self.logits = logits.double()  # [V]
        self.scaled = self.logits * scale
        self.block_size = block_size
        self.mantissas, self.exponents = _exp2(self.scaled)  # [V], [V]
        self.tops = torch.stack([block.amax() for block in torch.split(self.exponents, block_size)])  # [blocks]
        self.top = float(self.tops.amax())
        readable = self.top > NO_EXPONENT and bool((self.logits < math.inf).all())  # NaN is not below anything
        self.readable = readable
        if readable:
            self.sums = self._block_sums(self._local_weights())  # [blocks], each relative to its own exponent
            self.shares = self.sums >> (self.top - self.tops).clamp(max=63).long()  # [blocks], relative to `top`
            self.total = int(self.shares.sum())

    def weights(self) -> torch.Tensor:
        """int64 [V], relative to the row's largest exponent."""
        return _shift(self.mantissas, self.exponents, torch.tensor(self.top, dtype=torch.float64))

    def weight(self, token_id: int) -> int:
        """That of one token."""
        return int(self.weights()[token_id])

    def excess(self, draft_probs: torch.Tensor) -> torch.Tensor:
        """max(target - draft, 0) as int64 [V], in units of the target's weights."""
        return (self.weights() - (draft_probs * float(self.total)).long()).clamp(min=0)

    def sample(self, draw: float) -> int:
        """Inverse of the cumulative sum: of the blocks, then inside one, in its own finer units."""
        block, rest = _search(self.shares, _target(draw, self.total))
        shift = int(self.top - float(self.tops[block]))
        first = block * self.block_size
        return first + _search(self._local_weights()[first : first + self.block_size], rest << shift)[0]

    def _local_weights(self) -> torch.Tensor:
        tops = self.tops.repeat_interleave(self.block_size)[: len(self.exponents)]
        return _shift(self.mantissas, self.exponents, tops)

    def _block_sums(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.stack([block.sum() for block in torch.split(weights, self.block_size)])


def _reject(request: AcceptanceRequest, rows: Sequence[_Row], draft_probs: torch.Tensor, _: Noise) -> Outcome | None:
    for i, token_id in enumerate(request.draft_token_ids):
        row = rows[i]
        if not row.readable:
            return None
        weight = float(row.weight(token_id))
        if not request.accept_draws[i] * float(draft_probs[i, token_id]) * float(row.total) < weight:
            excess = row.excess(draft_probs[i])
            total = int(excess.sum())
            if total == 0:  # the rows differ by rounding alone: see runtime.rejection.residual
                return Outcome(i, row.sample(request.sample_draws[i]))
            return Outcome(i, _search(excess, _target(request.sample_draws[i], total))[0])
    k = len(request.draft_token_ids)
    return Outcome(k, rows[k].sample(request.sample_draws[k])) if rows[k].readable else None


def _match(request: AcceptanceRequest, rows: Sequence[_Row], _: torch.Tensor, noise: Noise) -> Outcome | None:
    """The target's own tokens for as long as the draft foresaw them."""
    for i, row in enumerate(rows):
        if not row.readable:
            return None
        scores = row.logits
        if request.rule is Rule.COUPLED:
            gumbel = noise(request.seed, request.position + i, len(row.logits)).to(row.logits.device)
            scores = row.scaled * math.log(2) + gumbel
        token_id = int(scores.argmax())  # the lowest id of equals
        if i == len(rows) - 1 or token_id != request.draft_token_ids[i]:
            return Outcome(i, token_id)
    raise AssertionError("the last row always decides")


def _exp2(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2 ** scaled as (mantissa int64, exponent float64): mantissa / 2 ** WEIGHT_BITS is within sqrt(1/2), sqrt(2)."""
    valid = scaled.isfinite()
    scaled = torch.where(valid, scaled, 0.0)
    exponents = (scaled + 0.5).floor()
    fraction = scaled - exponents
    value = torch.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        value = value * fraction + coefficient
    mantissas = (value * 2.0**WEIGHT_BITS).long()
    return torch.where(valid, mantissas, 0), torch.where(valid, exponents, NO_EXPONENT)


def _shift(mantissas: torch.Tensor, exponents: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    return mantissas >> (tops - exponents).clamp(max=63).long()


def _target(draw: float, total: int) -> int:
    """A draw in [0, 1) as an integer in [0, total)."""
    return min(int(draw * float(total)), total - 1)


def _search(weights: torch.Tensor, target: int) -> tuple[int, int]:
    """First index whose cumulative sum exceeds `target`, and by how much `target` exceeds the sum before it."""
    cumulative = weights.cumsum(0)
    index = int((cumulative <= target).sum())
    return index, target - (int(cumulative[index - 1]) if index else 0)
