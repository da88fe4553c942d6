"""The pool of blocks: tables, reference counts, reuse by content, eviction."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magicdec.runtime.engine.block_manager import BlockManager
from tests.support.audit import published

SIZE = 4
TEXT = list(range(100, 200))


def _manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, SIZE, prefix_caching=True)


def _serve(blocks: BlockManager, owner: str, token_ids: list[int], num_computed: int | None = None) -> int | None:
    """Allocate, compute and publish; returns the reused tokens."""
    reused = blocks.allocate(owner, token_ids, len(token_ids))
    if reused is not None:
        blocks.publish(owner, token_ids, len(token_ids) if num_computed is None else num_computed)
    blocks.check_integrity()
    return reused


def test_slots_follow_the_table() -> None:
    """Token i stands in the table's block i // size, at offset i % size."""
    blocks = _manager()
    assert blocks.allocate("other", [], 5) == 0
    assert blocks.allocate("a", [], 9) == 0
    table = blocks.table("a")
    assert len(table) == 3
    assert blocks.slots("a", 3, 9) == [table[0] * 4 + 3, *range(table[1] * 4, table[1] * 4 + 4), table[2] * 4]


def test_allocate_and_extend_change_nothing_when_blocks_run_out() -> None:
    """None and False, and the pool is as before."""
    blocks = _manager(4)
    assert blocks.allocate("a", [], 3 * SIZE) == 0
    assert blocks.allocate("b", [], 2 * SIZE) is None
    assert not blocks.owns("b")
    assert not blocks.extend("a", 5 * SIZE)
    assert len(blocks.table("a")) == 3
    assert blocks.extend("a", 4 * SIZE)
    assert blocks.extend("a", 1)  # never shrinks
    assert (len(blocks.table("a")), blocks.num_free_blocks) == (4, 0)
    blocks.free("a")
    blocks.check_integrity()
    assert blocks.num_free_blocks == 4


def test_prefix_is_shared_while_its_owner_lives_and_after() -> None:
    """Full blocks of the common beginning, by reference and not by copy."""
    blocks = _manager()
    assert _serve(blocks, "a", TEXT[:10]) == 0
    assert _serve(blocks, "b", [*TEXT[:10], 7]) == 8
    assert blocks.table("b")[:2] == blocks.table("a")[:2]
    assert blocks.num_used_blocks == 4
    shared = blocks.table("a")[:2]
    blocks.free("a")
    blocks.free("b")
    assert blocks.num_used_blocks == 0
    assert _serve(blocks, "c", TEXT[:9]) == 8
    assert blocks.table("c")[:2] == shared


def test_only_full_blocks_of_computed_tokens_are_found() -> None:
    """A block with one token missing is not; nor is one that is allocated and not computed."""
    blocks = _manager()
    assert _serve(blocks, "a", TEXT[:12], num_computed=7) == 0
    assert _serve(blocks, "b", TEXT[:12]) == 4
    assert len(published(blocks)) == 3  # b computed the others


def test_one_token_is_always_left_to_compute() -> None:
    """Its logits are wanted, so a prompt of whole blocks does not match itself completely."""
    blocks = _manager()
    assert _serve(blocks, "a", TEXT[:8]) == 0
    assert _serve(blocks, "b", TEXT[:8]) == 4


def test_content_means_everything_before_a_block_too() -> None:
    """Equal blocks after different beginnings differ; keys and values depend on the whole prefix."""
    blocks = _manager()
    assert _serve(blocks, "a", [1, 1, 1, 1, *TEXT[:8]]) == 0
    assert _serve(blocks, "b", [2, 2, 2, 2, *TEXT[:8]]) == 0
    assert _serve(blocks, "c", [*TEXT[:4], 9]) == 0


def test_equal_block_computed_twice_stays_findable_until_the_first_one_goes() -> None:
    """Two sequences side by side compute the same; one of the blocks is published, both are given back."""
    blocks = _manager()
    assert blocks.allocate("a", TEXT[:5], 5) == 0
    assert blocks.allocate("b", TEXT[:5], 5) == 0
    for owner in ("a", "b"):
        blocks.publish(owner, TEXT[:5], 5)
    assert published(blocks) == {blocks.table("a")[0]}
    blocks.free("a")
    blocks.free("b")
    blocks.check_integrity()
    assert _serve(blocks, "c", TEXT[:5]) == 4


def test_cached_blocks_count_as_free_and_are_evicted_least_recently_used_first() -> None:
    """Prefixes outlive what follows them."""
    blocks = _manager(4)
    for owner, start in (("a", 0), ("b", 40)):
        assert _serve(blocks, owner, TEXT[start : start + 8]) == 0
        blocks.free(owner)
    assert blocks.num_free_blocks == 4
    assert _serve(blocks, "a", TEXT[:5]) == 4  # used again: now b is the older one, and a's second block the oldest
    blocks.free("a")
    assert blocks.allocate("c", [], 2 * SIZE) == 0
    blocks.check_integrity()
    blocks.free("c")
    assert _serve(blocks, "a", TEXT[:9]) == 4
    blocks.free("a")
    assert _serve(blocks, "b", TEXT[40:49]) == 4  # its second block went, its first did not


def test_eviction_takes_the_end_of_a_prefix_first() -> None:
    """So that what is left can still be found from its beginning."""
    blocks = _manager(4)
    assert _serve(blocks, "a", TEXT[:16]) == 0
    blocks.free("a")
    for needed, left in ((1, 12), (1, 8), (2, 0)):
        assert blocks.allocate("x", [], needed * SIZE) == 0
        blocks.free("x")
        assert _serve(blocks, "b", TEXT[: left + 1]) == left
        blocks.free("b")


def test_revived_blocks_are_not_counted_as_free_for_the_rest() -> None:
    """A cached block that is reused is no longer one to be handed out."""
    blocks = _manager(3)
    assert _serve(blocks, "a", TEXT[:8]) == 0
    blocks.free("a")
    assert blocks.allocate("b", TEXT[:16], 16) is None  # 2 reused and 2 fresh, of 3
    blocks.check_integrity()
    assert blocks.allocate("b", TEXT[:12], 12) == 8


def test_without_prefix_caching_nothing_is_published() -> None:
    """As in the draft's pool, whose blocks are overwritten in a circle."""
    blocks = BlockManager(4, SIZE)
    assert blocks.allocate("a", TEXT[:8], 8) == 0
    blocks.publish("a", TEXT[:8], 8)
    assert not published(blocks)
    blocks.free("a")
    assert blocks.allocate("b", TEXT[:8], 8) == 0


@pytest.mark.parametrize("damage", ["ref_count", "lost", "twice", "table"])
def test_integrity_check_sees_damage(damage: str) -> None:
    """The invariant is worth asserting only if it fails."""
    blocks = _manager()
    assert _serve(blocks, "a", TEXT[:10]) == 0
    if damage == "ref_count":
        blocks._ref_counts[blocks.table("a")[0]] += 1
    elif damage == "lost":
        blocks._free.pop()
    elif damage == "twice":
        blocks._free.append(blocks._free[0])
    else:
        blocks._tables["a"][1] = blocks._tables["a"][0]
    with pytest.raises(AssertionError):
        blocks.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Against a model that knows only what stands in each block: a reused block must hold the very prefix."""

    @initialize(num_blocks=st.integers(4, 12))
    def build(self, num_blocks: int) -> None:
        """Few blocks, so that eviction is the rule."""
        self.blocks = BlockManager(num_blocks, SIZE, prefix_caching=True)
        self.content: dict[int, list[int]] = {}  # block -> all tokens up to its end
        self.sequences: dict[str, list[int]] = {}
        self.count = 0

    @rule(data=st.data(), length=st.integers(1, 24), branch=st.integers(0, 24), variant=st.integers(0, 2))
    def allocate(self, data: st.DataObject, length: int, branch: int, variant: int) -> None:
        """A text that leaves the common one somewhere; what is new is computed at once, or in part."""
        token_ids = [*TEXT[:branch], *(token + variant * 100 for token in TEXT[branch:])][:length]
        owner, before = str(self.count), self.blocks.num_free_blocks
        self.count += 1
        reused = self.blocks.allocate(owner, token_ids, length)
        if reused is None:
            assert self.blocks.num_free_blocks == before < -(-length // SIZE)
            return
        assert reused < length
        table = self.blocks.table(owner)
        for index in range(reused // SIZE):
            assert self.content[table[index]] == token_ids[: (index + 1) * SIZE], "reused block with other content"
        computed = data.draw(st.integers(reused, length))
        self._write(owner, token_ids, reused, computed)
        self.sequences[owner] = token_ids[:computed]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 9))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Decode some tokens."""
        owner = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens = self.sequences[owner]
        grown = [*tokens, *(random.Random(len(tokens)).choices(range(3), k=count))]
        if self.blocks.extend(owner, len(grown)):
            self._write(owner, grown, len(tokens), len(grown))
            self.sequences[owner] = grown

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """End a sequence."""
        owner = data.draw(st.sampled_from(sorted(self.sequences)))
        self.blocks.free(owner)
        del self.sequences[owner]

    @invariant()
    def holds(self) -> None:
        """The manager's own invariant, and every sequence still has its text."""
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_integrity()
        assert self.blocks.owners == set(self.sequences)
        for owner, token_ids in self.sequences.items():
            table = self.blocks.table(owner)
            for index in range(len(token_ids) // SIZE):
                assert self.content[table[index]] == token_ids[: (index + 1) * SIZE]

    def _write(self, owner: str, token_ids: list[int], start: int, stop: int) -> None:
        table = self.blocks.table(owner)
        for index in range(start // SIZE, -(-stop // SIZE)):
            assert table[index] not in published(self.blocks), "a published block is written"
            self.content[table[index]] = token_ids[: min((index + 1) * SIZE, stop)]
        self.blocks.publish(owner, token_ids, stop)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
