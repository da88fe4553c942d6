"""Draft caches without an engine: what a draft pass is fed and shown; `AuditedCache` compares it with the text."""

import random
from collections.abc import Sequence
from typing import Literal

import pytest
import torch

from magicdec.pair import budget
from magicdec.plugins.model.inputs import SequenceInput
from magicdec.runtime.drafting.views import CyclicView, DraftView, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.request import Request
from tests.support import toy
from tests.support.audit import AuditedCache, unpack
from tests.support.toy_runner import ToyRunner

Positions = Literal["in_cache", "absolute"]
POSITIONS: tuple[Positions, ...] = ("in_cache", "absolute")
# block_size, window_size, num_sink_tokens, max_draft_len
SHAPES = [(1, 1, 1, 1), (2, 3, 1, 2), (4, 8, 3, 4), (4, 8, 5, 3), (8, 8, 8, 8), (16, 16, 4, 8)]


class Draft:
    """A separate draft's cache with its runner; every view is audited, every row is computed."""

    def __init__(
        self, positions: Positions, shape: tuple[int, int, int, int] = (4, 8, 3, 4), requests: int = 1
    ) -> None:
        size, window, sinks, max_draft_len = shape
        each = budget.num_cyclic_blocks(sinks, window, size, max_draft_len)
        self.runner = ToyRunner(
            num_blocks=each * requests,
            block_size=size,
            num_sink_tokens=-(-sinks // size) * size,
            sinks_follow=positions == "in_cache",
        )
        self.inner = CyclicView(
            self.runner,
            window_size=window,
            num_sink_tokens=sinks,
            num_blocks_per_request=each,
            sink_positions=positions,
        )
        self.cache = AuditedCache(self.inner, self.runner, window, sinks)

    def propose(self, request: Request, drafts: Sequence[int]) -> SequenceInput:
        """Catch up, and feed all drafts but the last, as a proposer does; returns the catch-up row."""
        first = self.cache.catch_up([request])
        self.runner.forward(first)
        for count, token_id in enumerate(drafts[:-1], 1):
            self.runner.forward(self.cache.feed([request], [token_id], count))
        self.inner.blocks.check_integrity()
        return unpack(first)[0]


def _tokens(count: int, seed: float = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(toy.VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_views_over_hundreds_of_wraps(positions: Positions, shape: tuple[int, int, int, int]) -> None:
    """Rounds with any number of drafts and acceptances, and plain steps between them, up to far behind the window."""
    draft, rng = Draft(positions, shape), random.Random(str(shape))
    request = toy.request(_tokens(rng.randrange(1, 40)))
    size, window, _, max_draft_len = shape
    while len(request.token_ids) < 100 * (size + window):
        drafts = _tokens(rng.randrange(1, max_draft_len + 1), rng.random())
        draft.propose(request, drafts)
        request.token_ids += drafts[: rng.randrange(len(drafts) + 1)] + _tokens(1, rng.random())
        if rng.random() < 0.3:
            request.token_ids += _tokens(rng.choice([1, 2, window, 3 * window]), rng.random())
    assert draft.cache.num_bounded_views > 50
    assert draft.inner.blocks.num_used_blocks == draft.inner.num_blocks_per_request


@pytest.mark.parametrize("positions", POSITIONS)
def test_plain_steps_after_a_rejection_do_not_confirm_rejected_drafts(positions: Positions) -> None:
    """By its length alone the cache would seem valid again; the audit sees the rejected tokens."""
    draft, request = Draft(positions), toy.request(_tokens(30))
    draft.propose(request, [1, 2, 3, 4])
    request.token_ids += [5]  # all four rejected
    request.token_ids += [6, 7, 8]  # three plain steps
    row = draft.propose(request, [1, 2])
    assert list(row.token_ids) == [5, 6, 7, 8]


@pytest.mark.parametrize(("num_accepted", "fed"), [(0, [9]), (2, [9]), (3, [9]), (4, [4, 9])])
def test_accepted_drafts_are_not_read_again(num_accepted: int, fed: list[int]) -> None:
    """Only what the draft has not seen: the new token, and the last draft token, which it never read."""
    draft, request = Draft("in_cache"), toy.request(_tokens(30))
    draft.propose(request, [1, 2, 3, 4])
    request.token_ids += [*[1, 2, 3, 4][:num_accepted], 9]
    assert list(draft.propose(request, [1]).token_ids) == fed


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("length", [1, 3, 4, 12, 15, 16, 20, 500, 5000])
def test_prompt_is_read_in_bounded_form(positions: Positions, length: int) -> None:
    """Sinks and at most one block more than the window, whatever the prompt's length."""
    draft, request = Draft(positions), toy.request(_tokens(length))
    row = draft.propose(request, [1, 2])
    assert row.cache_len == 0
    assert len(row.token_ids) == length if length < 4 + 8 + 4 else 4 + 8 <= len(row.token_ids) < 4 + 8 + 4
    assert row.positions[-1] == length - 1


def test_draft_pool_is_constant_for_contexts_from_1k_to_32k() -> None:
    """Counted in the allocator, while the sequence grows and is read anew."""
    draft, request = Draft("in_cache"), toy.request(_tokens(1000))
    used = set()
    for length in (1000, 2000, 8000, 32000):
        request.token_ids += _tokens(length - len(request.token_ids))
        for _ in range(20):
            draft.propose(request, [1, 2, 3])
            request.token_ids += [1, 2, 3, 4]
            used.add(draft.inner.blocks.num_used_blocks)
    assert used == {1 + 2 + 2}  # sinks, window, spare blocks


def test_falling_behind_by_no_more_than_the_window_appends() -> None:
    """The window is 8: eight unread tokens are appended, nine make the draft start anew."""
    for count, cached in ((8, True), (9, False)):
        draft, request = Draft("in_cache"), toy.request(_tokens(50))
        draft.propose(request, [1])
        request.token_ids += _tokens(count)
        row = draft.propose(request, [1])
        assert (row.cache_len > 0) is cached


@pytest.mark.parametrize("positions", POSITIONS)
def test_rotary_distance_stays_below_the_budget_with_sinks_that_follow(positions: Positions) -> None:
    """So a draft trained on a short length never sees a longer distance; absolute sinks are left behind."""
    draft, request = Draft(positions), toy.request(_tokens(30))
    for _ in range(60):
        draft.propose(request, [1, 2, 3, 4])
        inputs = draft.cache.inner.catch_up([request])
        draft.runner.forward(inputs)
        (row,) = unpack(inputs)
        sink = draft.runner.slots[row.block_table[0] * 4]
        assert sink is not None
        distance = row.positions[-1] - sink.position
        assert distance < 5 * 4 if positions == "in_cache" else distance == len(request.token_ids) - 1
        request.token_ids += [1, 2, 9]


def test_sink_keys_are_copied_once_and_moved_with_each_evicted_block() -> None:
    """Always from the same position-free copy, so that rounding never adds up."""
    calls: list[tuple[str, int]] = []

    class Recorder(ToyRunner):
        def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
            calls.append(("read", positions[0]))
            return super().read_keys(slots, positions)

        def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
            calls.append(("write", positions[0]))
            super().write_keys(slots, positions, keys)

    runner = Recorder(num_blocks=5, num_sink_tokens=4, sinks_follow=True)
    cache = CyclicView(runner, window_size=8, num_sink_tokens=3, num_blocks_per_request=5, sink_positions="in_cache")
    request = toy.request(_tokens(17))
    for _ in range(15):
        runner.forward(cache.catch_up([request]))
        request.token_ids += [1]
    assert calls == [("read", 4), ("write", 8), ("write", 12)]


@pytest.mark.parametrize("positions", POSITIONS)
def test_release_gives_everything_back(positions: Positions) -> None:
    """And the request may come again; a request that never drafted holds nothing."""
    draft = Draft(positions, requests=2)
    first, second = toy.request(_tokens(40), "first"), toy.request(_tokens(40, 1), "second")
    for _ in range(3):
        draft.propose(first, [1, 2])
        draft.propose(second, [3, 4])
        draft.cache.release(first)
        assert draft.inner.blocks.owners == {"second"}
    draft.cache.release(second)
    draft.cache.release(first)
    assert draft.inner.blocks.num_used_blocks == 0


def test_target_window_names_sinks_and_window_of_the_targets_own_table() -> None:
    """Block 4, window 8, sinks 3: entries, table and slot of each draft row, by counting; one of two drops out."""
    blocks = BlockManager(40, 4)
    window: DraftView = TargetWindow(blocks, window_size=8, num_sink_tokens=3)
    for name in ("other", "0"):
        assert blocks.allocate(name, [], 72) is not None
    for length in range(1, 60):
        request, other = toy.request(_tokens(length)), toy.request(_tokens(70 - length), "other")
        for each in (request, other):
            each.num_computed_tokens = len(each.token_ids) - 1
        for count in range(10):
            drafting = [other, request] if count < 2 else [request]
            feeding = window.feed(drafting, [1] * len(drafting), count) if count else window.catch_up(drafting)
            for each, row in zip(drafting, unpack(feeding), strict=True):
                _check_view(row, list(blocks.table(each.request_id)), len(each.token_ids) - 1 + count)
    window.release(request)
    assert blocks.num_used_blocks == 36


def _check_view(row: SequenceInput, table: list[int], position: int) -> None:
    first = max(4, (position - 8) // 4 * 4)  # the first recent token that is seen
    seen = [*range(min(4, position)), *range(first, position)]
    assert list(row.positions) == [position]
    assert list(row.slot_mapping) == [table[position // 4] * 4 + position % 4]
    assert row.cache_len == len(seen)
    named = [row.block_table[entry // 4] * 4 + entry % 4 for entry in range(row.cache_len)]
    assert named == [table[token // 4] * 4 + token % 4 for token in seen]
    assert position - first >= min(8, position - 4)
