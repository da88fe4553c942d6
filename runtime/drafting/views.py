"""The two bounded views that a draft model looks through: a window on the target's own blocks, or a cyclic cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from magicdec.pair.budget import num_sink_blocks
from magicdec.pair.config import SinkPositions
from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack
from magicdec.runtime.drafting.cyclic_blocks import CyclicBlocks
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.request import Request
from magicdec.runtime.runners.interface import ModelRunner

_PASSES_AHEAD = 4


class DraftView(Protocol):
    """Knows, for each request, what a draft pass has to be fed and what it sees."""

    def catch_up(self, requests: Sequence[Request]) -> ModelInput:
        """Feed the committed tokens that the draft has not read yet; the last one's logits give the first draft."""
        ...

    def feed(self, requests: Sequence[Request], token_ids: Sequence[int], num_drafts: int) -> ModelInput:
        """Feed each request's draft token number `num_drafts` (1 = the first)."""
        ...

    def release(self, request: Request) -> None:
        """Drop what is held for the request."""
        ...


class TargetWindow:
    """Self-speculation: `[sink blocks | last window blocks]` of the target's own table. Holds no block, copies no key.

    The draft is the target, or the same model with other weights on the same pool. Drafts write their keys and values
    to the slots that the scheduler reserved behind the committed tokens, and that of the last committed one, which the
    target has not read yet; verification then overwrites all of them with the target's own, or they stay behind the
    committed length. Positions are absolute: the blocks are the target's.
    """

    def __init__(self, blocks: BlockManager, *, window_size: int, num_sink_tokens: int) -> None:
        self.blocks = blocks
        self.window_size = window_size
        self.num_sink_blocks = num_sink_blocks(num_sink_tokens, blocks.block_size)
        self._drafting: list[Request] = []
        self._passes: dict[int, _WindowPass] = {}  # by the number of drafts before: what was looked up for them

    def catch_up(self, requests: Sequence[Request]) -> ModelInput:
        """The target has read all but the last committed token already."""
        assert all(request.num_pending_tokens == 1 for request in requests)
        self._look_ahead(requests, 0)
        return self._passes[0].of([request.token_ids[-1] for request in requests])

    def feed(self, requests: Sequence[Request], token_ids: Sequence[int], num_drafts: int) -> ModelInput:
        """One draft token each at the next position."""
        if requests != self._drafting or num_drafts not in self._passes:
            self._look_ahead(requests, num_drafts)
        return self._passes[num_drafts].of(token_ids)

    def release(self, request: Request) -> None:
        """The blocks are the target's."""

    def _look_ahead(self, requests: Sequence[Request], num_drafts: int) -> None:
        """At once for several passes, since what they see depends on no token; rows that are not reserved go unused."""
        tables = self.blocks.tables([request.request_id for request in requests])
        lengths = np.array([len(request.token_ids) for request in requests])
        size, sinks, passes = tables.block_size, self.num_sink_blocks, range(num_drafts, num_drafts + _PASSES_AHEAD)
        positions = (lengths - 1 + np.array(passes)[:, None]).ravel()  # [passes * B]
        sequences = np.tile(np.arange(len(requests)), _PASSES_AHEAD)
        skipped = np.maximum(sinks, (positions - self.window_size) // size) - sinks
        views = tables.views(sequences, positions // size + 1, sinks, skipped)
        columns = (positions, positions - skipped * size, views, tables.slots(sequences, positions))
        split = zip(*(torch.from_numpy(column).chunk(_PASSES_AHEAD) for column in columns), strict=True)
        self._drafting = list(requests)
        self._passes = {number: _WindowPass(*each) for number, each in zip(passes, split, strict=True)}


class _WindowPass(NamedTuple):
    """One row each of B sequences, as in `ModelInput`, but for the tokens."""

    positions: torch.Tensor  # [B]
    cache_lens: torch.Tensor  # [B]
    block_table: torch.Tensor  # [B, max_blocks]
    slot_mapping: torch.Tensor  # [B]

    def of(self, token_ids: Sequence[int]) -> ModelInput:
        """The pass's inputs with these tokens [B]."""
        starts = torch.arange(len(token_ids) + 1)
        return ModelInput(
            input_ids=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
            query_start_loc=starts,
            logits_indices=starts[:-1],
            **self._asdict(),
        )


class CyclicView:
    """A separate draft model's caches: one `CyclicBlocks` a request, from the draft's own pool of blocks.

    A prompt is read in bounded form: only the sinks and the last `window_size` tokens, as one short sequence. Tokens
    are read again from there whenever the draft has fallen further behind than its window (after plain steps).
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        window_size: int,
        num_sink_tokens: int,
        num_blocks_per_request: int,
        sink_positions: SinkPositions,
    ) -> None:
        self.runner = runner
        self.blocks = BlockManager(runner.num_blocks, runner.block_size)
        self.window_size = window_size
        self.num_sink_tokens = num_sink_tokens
        self.num_blocks_per_request = num_blocks_per_request
        self.sinks_follow = sink_positions == "in_cache"
        self._states: dict[str, _DraftState] = {}

    def catch_up(self, requests: Sequence[Request]) -> ModelInput:
        """Everything committed that the draft has not read; the whole bounded view if it is too far behind."""
        return pack([self._catch_up(request) for request in requests])

    def feed(self, requests: Sequence[Request], token_ids: Sequence[int], num_drafts: int) -> ModelInput:
        """One draft token each."""
        return pack([self._feed(*each, num_drafts) for each in zip(requests, token_ids, strict=True)])

    def release(self, request: Request) -> None:
        """Give the blocks back."""
        if self._states.pop(request.request_id, None) is not None:
            self.blocks.free(request.request_id)

    def _catch_up(self, request: Request) -> SequenceInput:
        state, token_ids = self._state_of(request), request.token_ids
        cache, num_tokens = state.cache, len(token_ids)
        cache.rewind(min(state.num_confirmed(token_ids), num_tokens - 1))
        state.num_committed, state.drafts = num_tokens, []
        if cache.cache_len == 0 or num_tokens - cache.num_tokens > self.window_size:
            return self._read_bounded(token_ids, state)
        return self._append(state, token_ids[cache.num_tokens :])

    def _feed(self, request: Request, token_id: int, num_drafts: int) -> SequenceInput:
        state = self._states[request.request_id]
        state.drafts.append(token_id)
        assert len(state.drafts) == num_drafts
        return self._append(state, [token_id])

    def _state_of(self, request: Request) -> "_DraftState":
        owner, size = request.request_id, self.blocks.block_size
        if owner not in self._states:
            allocated = self.blocks.allocate(owner, [], self.num_blocks_per_request * size)
            assert allocated is not None, "the draft pool is sized for max_batch_size requests"
            self._states[owner] = _DraftState(CyclicBlocks(self.blocks.table(owner), self.num_sink_tokens, size))
        return self._states[owner]

    def _read_bounded(self, token_ids: list[int], state: "_DraftState") -> SequenceInput:
        """Sinks and window of the committed tokens as one short sequence."""
        cache, size = state.cache, state.cache.block_size
        sinks = cache.num_sink_blocks * size
        evicted = max(0, (len(token_ids) - self.window_size - sinks) // size * size)
        cache.start_at(evicted)
        state.sink_keys = None
        return self._append(state, token_ids[:sinks] + token_ids[sinks + evicted :])

    def _append(self, state: "_DraftState", token_ids: Sequence[int]) -> SequenceInput:
        cache = state.cache
        evicted, cache_len = cache.num_evicted_tokens, cache.cache_len
        slots = cache.append(len(token_ids))
        if cache_len and self.sinks_follow and cache.num_evicted_tokens != evicted:
            self._move_sinks(state, evicted)
        first = cache.cache_len - len(token_ids)
        return SequenceInput(
            token_ids=token_ids,
            positions=[self._position(cache, entry) for entry in range(first, cache.cache_len)],
            cache_len=first,
            block_table=cache.block_table,
            slot_mapping=slots,
            num_logits=1,
        )

    def _position(self, cache: CyclicBlocks, entry: int) -> int:
        """Rotary position of a view entry: in-cache positions are contiguous, absolute sinks stay where they were."""
        if entry < cache.num_sink_blocks * cache.block_size and not self.sinks_follow:
            return entry
        return cache.num_evicted_tokens + entry

    def _move_sinks(self, state: "_DraftState", evicted_before: int) -> None:
        """Rotate the sink keys anew for the window's new place, always from the same position-free copy."""
        cache, size = state.cache, state.cache.block_size
        blocks = cache.block_table[: cache.num_sink_blocks]
        slots = [block * size + offset for block in blocks for offset in range(size)]
        if state.sink_keys is None:
            before = list(range(evicted_before, evicted_before + len(slots)))
            state.sink_keys = self.runner.read_keys(slots, before)
        after = list(range(cache.num_evicted_tokens, cache.num_evicted_tokens + len(slots)))
        self.runner.write_keys(slots, after, state.sink_keys)


@dataclass
class _DraftState:
    """What the draft has read of one request."""

    cache: CyclicBlocks
    num_committed: int = 0  # committed tokens, as of the last catch-up
    drafts: list[int] = field(default_factory=list)  # draft tokens behind them
    sink_keys: torch.Tensor | None = None  # position-free copies, taken when the window first moves

    def num_confirmed(self, token_ids: Sequence[int]) -> int:
        """How many tokens it has read that were committed, as they were read.

        Compared token by token: plain steps may have gone by since the drafts, so that the length alone no longer
        tells how many of them were accepted.
        """
        accepted = 0
        for draft, token_id in zip(self.drafts, token_ids[self.num_committed :], strict=False):
            if draft != token_id:
                break
            accepted += 1
        return self.num_committed + accepted
