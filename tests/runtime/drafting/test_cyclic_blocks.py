"""The cyclic cache alone, against a list: what stands in which slot after any appends, rewinds and wraps."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magicdec.errors import ConfigError
from magicdec.pair import budget
from magicdec.pair.budget import num_sink_blocks
from magicdec.runtime.drafting.cyclic_blocks import CyclicBlocks


class Model:
    """The naive model: the whole text as a list, and what was last written to each slot."""

    def __init__(self, size: int, window: int, sinks: int, max_draft_len: int, seed: int = 0) -> None:
        count = budget.num_cyclic_blocks(sinks, window, size, max_draft_len)
        self.blocks = random.Random(seed).sample(range(1000), count)
        self.cache = CyclicBlocks(self.blocks, sinks, size)
        self.size, self.window, self.max_draft_len = size, window, max_draft_len
        self.num_sinks = num_sink_blocks(sinks, size) * size
        self.text: list[int] = []
        self.slots: dict[int, int] = {}
        self.next_token = 0
        self.rewindable = 0  # tokens that were appended since the last rewind and may be taken back

    def append(self, count: int) -> None:
        """New tokens, all different."""
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        self.text += tokens
        slots = self.cache.append(count)
        sinks = {block * self.size + offset for block in self.blocks for offset in range(self.size)}
        assert len(set(slots)) == count
        assert set(slots) <= sinks
        self.slots.update(zip(slots, tokens, strict=True))
        self.check()

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            del self.text[-count:]
        self.cache.rewind(len(self.text))
        self.check()

    def restart(self, behind: int) -> None:
        """As if `behind` tokens had gone by unread: start anew from sinks and window, in one append."""
        self.text += range(self.next_token, self.next_token + behind)
        self.next_token += behind
        evicted = max(0, (len(self.text) - self.window - self.num_sinks) // self.size * self.size)
        self.cache.start_at(evicted)
        shown = self.text[: self.num_sinks] + self.text[self.num_sinks + evicted :]
        self.slots.update(zip(self.cache.append(len(shown)), shown, strict=True))
        self.check()

    def check(self) -> None:
        """The view is the sinks and the last tokens; it never grows, and never shows less than the window."""
        cache, table = self.cache, self.cache.block_table
        assert sorted(table) == sorted(self.blocks), "blocks are reused, never exchanged"
        assert table[: cache.num_sink_blocks] == self.blocks[: cache.num_sink_blocks], "sinks stay"
        assert cache.num_tokens == len(self.text)
        assert 0 <= cache.cache_len <= cache.capacity == len(self.blocks) * self.size
        assert cache.num_evicted_tokens % self.size == 0
        view = [self.slots[table[i // self.size] * self.size + i % self.size] for i in range(cache.cache_len)]
        num_recent = max(0, cache.cache_len - self.num_sinks)
        assert num_recent >= min(self.window, len(self.text) - self.num_sinks), "less than the window is visible"
        expected = self.text[: self.num_sinks] + self.text[len(self.text) - num_recent :] if num_recent else self.text
        assert view == expected, "a visible token was overwritten"


SHAPES = [(1, 1, 1, 1), (2, 3, 1, 2), (4, 4, 0, 4), (4, 6, 5, 4), (4, 8, 4, 1), (8, 8, 1, 8), (16, 32, 4, 8)]


@pytest.mark.parametrize("shape", SHAPES)
def test_hundreds_of_wraps(shape: tuple[int, int, int, int]) -> None:
    """Rounds of catching up, drafting and rewinding, until the window has gone round 200 times."""
    model, rng = Model(*shape), random.Random(str(shape))
    size, window, _, max_draft_len = shape
    model.append(rng.randrange(1, window + 1))
    turns = 200 * (len(model.blocks) - model.cache.num_sink_blocks)
    while model.cache.num_evicted_tokens < turns * size:
        model.append(rng.choice([1, 1, 2, window]))
        drafts = rng.randrange(max_draft_len + 1)
        for _ in range(drafts):
            model.append(1)
        model.rewind(rng.randrange(drafts + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", range(1, 10))
def test_every_burst_across_every_border(shape: tuple[int, int, int, int], count: int) -> None:
    """Appends of each length from each fill level around the wrap, each rewind after it."""
    size, _, _, max_draft_len = shape
    capacity = Model(*shape).cache.capacity
    for fill in range(capacity - size - 1, capacity + size + 1):
        for back in range(min(count, max_draft_len) + 1):
            model = Model(*shape)
            for _ in range(fill):
                model.append(1)
            if count > capacity - model.num_sinks - size:  # would rotate past the sinks
                with pytest.raises(AssertionError):
                    model.cache.append(count)
                continue
            model.append(count)
            model.rewind(back)
            model.append(1)


class CyclicMachine(RuleBasedStateMachine):
    """Any order of appends, rewinds and restarts, as the draft cache may use them."""

    @initialize(
        size=st.sampled_from([1, 2, 4, 8]),
        window=st.integers(1, 20),
        sinks=st.integers(0, 9),
        draft_len=st.integers(1, 8),
        seed=st.integers(0, 99),
    )
    def build(self, size: int, window: int, sinks: int, draft_len: int, seed: int) -> None:
        """Windows and sinks need not be whole blocks."""
        self.model = Model(size, window, sinks, min(draft_len, size), seed)

    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        """Up to a window of committed tokens at once; they are not taken back."""
        self.model.append(data.draw(st.integers(1, self.model.window)))
        self.model.rewindable = 0

    @precondition(lambda self: self.model.rewindable < self.model.max_draft_len)
    @rule()
    def draft(self) -> None:
        """One more draft token."""
        self.model.append(1)
        self.model.rewindable += 1

    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        """Take back some drafts; the others are committed then."""
        self.model.rewind(data.draw(st.integers(0, self.model.rewindable)))
        self.model.rewindable = 0

    @rule(behind=st.integers(1, 60), wraps=st.integers(1, 40))
    def fall_behind(self, behind: int, wraps: int) -> None:
        """Start anew far away, then go round many times."""
        self.model.restart(behind)
        for _ in range(wraps):
            self.model.append(self.model.window)
        self.model.rewindable = 0

    @invariant()
    def holds(self) -> None:
        """Whatever was done."""
        if hasattr(self, "model"):
            self.model.check()


TestCyclic = CyclicMachine.TestCase
TestCyclic.settings = settings(max_examples=80, stateful_step_count=40)


def test_nothing_is_evicted_before_the_blocks_are_full() -> None:
    """Until then the table is the whole sequence."""
    model = Model(4, 8, 3, 4)
    for count in range(1, 1 + 5 * 4):
        model.append(1)
        assert (model.cache.num_evicted_tokens, model.cache.cache_len) == (0, count)
    model.append(1)
    assert (model.cache.num_evicted_tokens, model.cache.cache_len) == (4, 17)


def test_rewind_reaches_no_evicted_token_and_invents_none() -> None:
    """Going back too far is a fault of ours; going forward changes nothing."""
    model = Model(4, 8, 3, 4)
    model.append(20)
    model.append(8)
    assert model.cache.num_evicted_tokens == 8
    model.cache.rewind(99)
    assert model.cache.num_tokens == 28
    with pytest.raises(AssertionError):
        model.cache.rewind(11)


def test_blocks_of_one_cache_are_counted_without_the_context_length() -> None:
    """Whole sink blocks, whole window blocks, two spare ones; longer drafts than a block are refused."""
    assert budget.num_cyclic_blocks(4, 512, 16, 8) == 1 + 32 + 2
    assert budget.num_cyclic_blocks(17, 500, 16, 16) == 2 + 32 + 2
    with pytest.raises(ConfigError, match="max_draft_len=17 is more than block_size=16"):
        budget.num_cyclic_blocks(4, 512, 16, 17)
