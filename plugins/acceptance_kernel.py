"""The fused acceptance of `acceptance` in Triton's language, for CUDA: same draws, same tokens, bit for bit.

Four launches and one copy to the host for a whole batch, whatever its requests ask for. `_summarize` reads the target's
logits once and splits the vocabulary over the device; `_decide` walks down each request's rows; `_subtract` reads again
the rows that were rejected; `_choose` looks into the one block that holds the token. Products and sums are rounded one
by one (no fused multiply-add), as in the reference.

Importing this module imports triton; the rest of the package does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from magicdec.plugins import acceptance
from magicdec.plugins.acceptance import AcceptanceRequest, Outcome, Rule, check_shapes
from magicdec.plugins.acceptance_ops import (
    INFINITY,
    NO_EXPONENT,
    UNREADABLE,
    distance,
    excess,
    exp2,
    gumbel,
    load,
    weights,
)

_REJECTION = tl.constexpr(int(Rule.REJECTION))
_COUPLED = tl.constexpr(int(Rule.COUPLED))
_LOG_2 = tl.constexpr(math.log(2))
_NO_TOKEN = tl.constexpr(2**30)  # above any id

# Columns of the tables that describe rows: float64 [N, 3] and int64 [N, 4].
_SCALE, _ACCEPT_DRAW, _SAMPLE_DRAW, _FLOATS = (tl.constexpr(i) for i in range(4))
_RULE, _SEED, _POSITION, _DRAFT_TOKEN, _INTS = (tl.constexpr(i) for i in range(5))
# Columns of the result, int64 [B, 5]; the first three are for the host.
_NUM_ACCEPTED, _TOKEN, _UNREADABLE, _ROW, _TOTAL, _RESULTS = (tl.constexpr(i) for i in range(6))


def accept(
    logits: torch.Tensor,  # [N, V], N = sum of k + 1; float64, float32, bfloat16 or float16
    draft_probs: torch.Tensor,  # [M, V], M = sum of k, on the same device
    requests: Sequence[AcceptanceRequest],
    block_size: int = acceptance.BLOCK_SIZE,
) -> list[Outcome | None]:
    """`acceptance.accept` on the device, where the coupled rule's Gumbel noise is made as well (`sampling.draws`)."""
    check_shapes(logits, draft_probs, requests)
    if not requests:
        return []
    logits, draft_probs = _row_major(logits), _row_major(draft_probs)
    device, (num_rows, vocab_size), count = logits.device, logits.shape, len(requests)
    blocks = triton.cdiv(vocab_size, block_size)
    starts, floats, ints = _tables(requests, device)
    tops = torch.empty(num_rows, blocks, dtype=torch.float64, device=device)
    sums = torch.empty(num_rows, blocks, dtype=torch.int64, device=device)
    best = torch.empty_like(tops)
    best_ids = torch.empty_like(sums)
    results = torch.empty(count, _RESULTS.value, dtype=torch.int64, device=device)
    target = (logits, logits.stride(0))
    both = (*target, draft_probs, draft_probs.stride(0))
    partials = (tops, sums, best, best_ids)
    block = {"BLOCK": block_size}
    width = {"BLOCKS": triton.next_power_of_2(blocks)}
    exact = {"enable_fp_fusion": False}
    _summarize[(num_rows, blocks)](*target, vocab_size, floats, ints, *partials, blocks, **block, **exact)
    _decide[(count,)](*both, starts, floats, ints, *partials, results, blocks, **width, **exact)
    if any(request.rule is Rule.REJECTION for request in requests):
        excesses = torch.empty(count, blocks, dtype=torch.int64, device=device)
        last = (results, excesses, blocks)
        _subtract[(count, blocks)](*both, vocab_size, starts, floats, ints, tops, *last, **block, **width, **exact)
        _choose[(count,)](*both, vocab_size, floats, ints, tops, sums, *last, **block, **width, **exact)
    rows = results[:, : _UNREADABLE.value + 1].tolist()
    return [None if unreadable else Outcome(num_accepted, token) for num_accepted, token, unreadable in rows]


def _row_major(table: torch.Tensor) -> torch.Tensor:
    return table if table.stride(1) == 1 else table.contiguous()


def _tables(
    requests: Sequence[AcceptanceRequest], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First row of each request [B + 1], and what describes rows: float64 [N, 3], int64 [N, 4]."""
    starts, floats, ints = [0], [], []
    for request in requests:
        k = len(request.draft_token_ids)
        accept_draws = [*request.accept_draws, 0.0] if request.accept_draws else [0.0] * (k + 1)
        sample_draws = request.sample_draws or [0.0] * (k + 1)
        seed = request.seed - 2**64 if request.seed >= 2**63 else request.seed
        floats += [(request.scale, accept_draws[i], sample_draws[i]) for i in range(k + 1)]
        tokens = [*request.draft_token_ids, -1]
        ints += [(int(request.rule), seed, request.position + i, tokens[i]) for i in range(k + 1)]
        starts.append(len(ints))
    return (
        torch.tensor(starts, dtype=torch.int64).to(device),
        torch.tensor(floats, dtype=torch.float64).to(device),
        torch.tensor(ints, dtype=torch.int64).to(device),
    )


@triton.jit
def _summarize(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one row: its largest exponent and sum of weights, or its best score and that token."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = load(logits, row, stride, ids, ids < vocab_size, -INFINITY)
    scaled = values * tl.load(floats + row * _FLOATS + _SCALE)
    readable = values < INFINITY  # NaN is not below anything
    mantissas, exponents = exp2(scaled, readable & (values > -INFINITY))
    top = tl.max(exponents)
    unreadable = tl.max((~readable).to(tl.int32))
    tl.store(tops + row * blocks + block, tl.where(unreadable > 0, UNREADABLE, top))
    rule = tl.load(ints + row * _INTS + _RULE)
    if rule == _REJECTION:
        tl.store(sums + row * blocks + block, tl.sum(mantissas >> distance(top, exponents)))
    else:
        scores = values
        if rule == _COUPLED:
            seed, position = tl.load(ints + row * _INTS + _SEED), tl.load(ints + row * _INTS + _POSITION)
            scores = scaled * _LOG_2 + gumbel(seed, position, block, BLOCK)
        scores = tl.where(ids < vocab_size, scores, -INFINITY)
        highest = tl.max(scores)
        tl.store(best + row * blocks + block, highest)
        tl.store(best_ids + row * blocks + block, tl.min(tl.where(scores == highest, ids, _NO_TOKEN)))


@triton.jit
def _decide(
    logits: tl.tensor,
    stride: tl.tensor,
    draft_probs: tl.tensor,
    draft_stride: tl.tensor,
    starts: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    results: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """One request: go down its rows while draft tokens are accepted."""
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + request)
    index = tl.arange(0, BLOCKS)
    row, unreadable, going = first, first * 0, first * 0 + 1
    total, chosen = first * 0, first * 0
    while going > 0:
        base, mask = row * blocks + index, index < blocks
        block_tops = tl.load(tops + base, mask=mask, other=NO_EXPONENT)
        top = tl.max(block_tops)
        unreadable = ((top == UNREADABLE) | (top == NO_EXPONENT)).to(tl.int64)
        token = tl.load(ints + row * _INTS + _DRAFT_TOKEN)  # -1 in the last row
        if tl.load(ints + row * _INTS + _RULE) == _REJECTION:
            block_sums = tl.load(sums + base, mask=mask, other=0)
            total = tl.sum(block_sums >> distance(top, block_tops))
            logit = load(logits, row, stride, token, token >= 0, -INFINITY)
            weight = weights(logit, tl.load(floats + row * _FLOATS + _SCALE), top)
            draft_prob = load(draft_probs, row - request, draft_stride, token, token >= 0, 0.0)
            draw = tl.load(floats + row * _FLOATS + _ACCEPT_DRAW)
            going = (draw * draft_prob * total.to(tl.float64) < weight.to(tl.float64)).to(tl.int64)
        else:
            scores = tl.load(best + base, mask=mask, other=-INFINITY)
            highest = tl.max(scores)
            winners = tl.load(best_ids + base, mask=mask & (scores == highest), other=_NO_TOKEN)
            chosen = tl.min(winners)
            going = (chosen == token).to(tl.int64)
        going = tl.where((token >= 0) & (unreadable == 0), going, 0)
        row += going
    result = results + request * _RESULTS
    tl.store(result + _NUM_ACCEPTED, row - first)
    tl.store(result + _TOKEN, chosen)
    tl.store(result + _UNREADABLE, unreadable)
    tl.store(result + _ROW, row)
    tl.store(result + _TOTAL, total)


@triton.jit
def _subtract(
    logits: tl.tensor,
    stride: tl.tensor,
    draft_probs: tl.tensor,
    draft_stride: tl.tensor,
    vocab_size: tl.tensor,
    starts: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    tops: tl.tensor,
    results: tl.tensor,
    excesses: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One block of one request's last row: the sum of max(target - draft, 0), if its draft token was rejected."""
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    result = results + request * _RESULTS
    row = tl.load(result + _ROW)
    if _is_rejected(result, row, starts, ints, request):
        index = tl.arange(0, BLOCKS)
        top = tl.max(tl.load(tops + row * blocks + index, mask=index < blocks, other=NO_EXPONENT))
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = load(logits, row, stride, ids, ids < vocab_size, -INFINITY)
        drafts = load(draft_probs, row - request, draft_stride, ids, ids < vocab_size, 0.0)
        scale, total = tl.load(floats + row * _FLOATS + _SCALE), tl.load(result + _TOTAL)
        tl.store(excesses + request * blocks + block, tl.sum(excess(values, scale, top, total, drafts)))
    else:
        tl.store(excesses + request * blocks + block, 0)


@triton.jit
def _is_rejected(
    result: tl.tensor, row: tl.tensor, starts: tl.tensor, ints: tl.tensor, request: tl.tensor
) -> tl.tensor:
    """Whether the request drew, and ends before its last row."""
    draws = (tl.load(ints + row * _INTS + _RULE) == _REJECTION) & (tl.load(result + _UNREADABLE) == 0)
    return draws & (row + 1 < tl.load(starts + request + 1))


@triton.jit
def _choose(
    logits: tl.tensor,
    stride: tl.tensor,
    draft_probs: tl.tensor,
    draft_stride: tl.tensor,
    vocab_size: tl.tensor,
    floats: tl.tensor,
    ints: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    results: tl.tensor,
    excesses: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One request that draws: its recovered or bonus token, first the block, then the token in it."""
    request = tl.program_id(0).to(tl.int64)
    result = results + request * _RESULTS
    row = tl.load(result + _ROW)
    if (tl.load(ints + row * _INTS + _RULE) == _REJECTION) & (tl.load(result + _UNREADABLE) == 0):
        index = tl.arange(0, BLOCKS)
        base, mask = row * blocks + index, index < blocks
        block_tops = tl.load(tops + base, mask=mask, other=NO_EXPONENT)
        top = tl.max(block_tops)
        total = tl.load(result + _TOTAL)
        draw = tl.load(floats + row * _FLOATS + _SAMPLE_DRAW)
        shares = tl.load(sums + base, mask=mask, other=0) >> distance(top, block_tops)
        excess_shares = tl.load(excesses + request * blocks + index, mask=mask, other=0)
        recovers = tl.sum(excess_shares) > 0  # 0: accepted all, or the rows differ by rounding alone
        shares = tl.where(recovers, excess_shares, shares)
        block, rest = _search(shares, _target(draw, tl.sum(shares)), index)

        block_top = tl.where(recovers, top, tl.load(tops + row * blocks + block))
        ids = block * BLOCK + tl.arange(0, BLOCK)
        values = load(logits, row, stride, ids, ids < vocab_size, -INFINITY)
        num_drafts = tl.where(recovers, vocab_size, 0)  # without: the target's own weights
        drafts = load(draft_probs, row - request, draft_stride, ids, ids < num_drafts, 0.0)
        scale = tl.load(floats + row * _FLOATS + _SCALE)
        inner = excess(values, scale, block_top, total, drafts)
        token, _ = _search(inner, rest << distance(top, block_top), tl.arange(0, BLOCK))
        tl.store(result + _TOKEN, block * BLOCK + token)


@triton.jit
def _target(draw: tl.tensor, total: tl.tensor) -> tl.tensor:
    """A draw in [0, 1) as an integer in [0, total)."""
    return tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _search(shares: tl.tensor, target: tl.tensor, index: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First index whose cumulative sum exceeds `target`, and by how much `target` exceeds the sum before it."""
    found = tl.sum((tl.cumsum(shares) <= target).to(tl.int64))
    return found, target - tl.sum(tl.where(index < found, shares, 0))
