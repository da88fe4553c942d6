"""Attention over a paged cache: the one function behind which every kernel stands, and its plain PyTorch reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from magicdec.plugins.cpu import attention as native_attention
from magicdec.plugins.cpu.library import native
from magicdec.plugins.fp8 import FP8, from_fp8

MAX_RUNS = 32  # beyond this a gather is cheaper than one product for each run of neighbouring blocks
ROWS_PER_CHUNK = 256  # query rows whose scores are held at a time


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a packed pass: its query rows, and the cache entries that they may see."""

    first_row: int
    num_rows: int
    cache_len: int  # entries before the new rows; row i sees entries 0 .. cache_len + i
    runs: tuple[tuple[int, int], ...]  # (first slot, slots) of each run of neighbouring blocks, in logical order


class SequenceViews(tuple[SequenceView, ...]):
    """The sequences of one pass, and what the native kernel reads of them, made once for all layers."""

    block_table: Sequence[Sequence[int]]
    block_size: int

    @cached_property
    def native(self) -> native_attention.PagedSequences:
        """These sequences in the native library's memory."""
        starts = [0] if not self else [*(view.first_row for view in self), self[-1].first_row + self[-1].num_rows]
        cache_lens = [view.cache_len for view in self]
        return native_attention.PagedSequences(starts, cache_lens, self.block_table, self.block_size)


def sequence_views(
    query_start_loc: Sequence[int], cache_lens: Sequence[int], block_table: Sequence[Sequence[int]], block_size: int
) -> SequenceViews:
    """Turn block tables into runs of slots, once for all layers of a pass."""
    views = []
    for index, cache_len in enumerate(cache_lens):
        first, last = query_start_loc[index], query_start_loc[index + 1]
        length = cache_len + last - first
        views.append(SequenceView(first, last - first, cache_len, _runs(block_table[index], length, block_size)))
    result = SequenceViews(views)
    result.block_table, result.block_size = block_table[: len(views)], block_size
    return result


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, views: SequenceViews
) -> torch.Tensor:
    """Causal attention of every sequence's rows over its own view, grouped queries sharing a KV head.

    query: [T, heads, head_size], scaled already; keys, values: [kv_heads, slots, head_size] of one layer, the new
    rows written. Returns [T, heads, head_size]. Softmax in at least float32. The cache is read where it lies, and an
    FP8 one's scales are the caller's (keys': in the query, values': on the result). By the native kernel where it
    knows these tensors: then a row's result does not depend, in any bit, on the other rows of the pass.
    """
    if native_attention.supports(query, keys) and (library := native()):
        return native_attention.paged_attention(library, query, keys, values, views.native)
    return reference_attention(query, keys, values, views)


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, views: Sequence[SequenceView]
) -> torch.Tensor:
    """The same in plain PyTorch, on any device and in any dtype; a cache of FP8 is converted a sequence at a time."""
    out = torch.empty_like(query)
    for view in views:
        key_runs, value_runs = (_read(cache, view.runs, query.dtype) for cache in (keys, values))
        for start in range(0, view.num_rows, ROWS_PER_CHUNK):
            stop = min(start + ROWS_PER_CHUNK, view.num_rows)
            rows = slice(view.first_row + start, view.first_row + stop)
            out[rows] = _attend(query[rows], key_runs, value_runs, view.cache_len + start)
    return out


def _attend(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], cache_len: int) -> torch.Tensor:
    """Rows [n, heads, head_size] of one sequence; row i sees the first cache_len + i + 1 entries of the runs."""
    num_rows, num_heads, head_size = query.shape
    num_kv_heads, length = keys[0].shape[0], cache_len + num_rows
    keys, values = _cut(keys, length), _cut(values, length)
    grouped = query.transpose(0, 1).reshape(num_kv_heads, -1, head_size)  # [kv_heads, group * n, head_size]
    scores = torch.cat([torch.matmul(grouped, run.transpose(1, 2)) for run in keys], dim=-1)
    if num_rows > 1:
        future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
        scores.view(num_kv_heads, -1, num_rows, length)[..., cache_len:].masked_fill_(future, -torch.inf)
    wide = torch.promote_types(query.dtype, torch.float32)
    probs = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    parts = torch.split(probs, [run.shape[1] for run in values], dim=-1)
    total = sum(torch.matmul(part, run) for part, run in zip(parts, values, strict=True))
    assert isinstance(total, torch.Tensor)
    return total.view(num_heads, num_rows, head_size).transpose(0, 1)


def _read(cache: torch.Tensor, runs: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """The runs as views of the cache [kv_heads, run, head_size]; one gathered copy if they are many, or of FP8."""
    if len(runs) <= MAX_RUNS:
        parts = [cache[:, first : first + length] for first, length in runs]
    else:
        slots = torch.cat([torch.arange(first, first + length, device=cache.device) for first, length in runs])
        parts = [cache[:, slots]]
    return [from_fp8(part, dtype) for part in parts] if cache.dtype == FP8 else parts


def _cut(runs: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    """The first `length` entries."""
    kept = []
    for run in runs:
        if length <= 0:
            break
        kept.append(run[:, :length])
        length -= run.shape[1]
    return kept


def _runs(blocks: Sequence[int], length: int, block_size: int) -> tuple[tuple[int, int], ...]:
    runs: list[list[int]] = []
    for block in blocks[: -(-length // block_size)]:
        if runs and runs[-1][0] + runs[-1][1] == block * block_size:
            runs[-1][1] += block_size
        else:
            runs.append([block * block_size, block_size])
    runs[-1][1] -= -length % block_size
    return tuple((first, count) for first, count in runs)
