"""The one owner of a pool of KV blocks: tables, reference counts, and reuse of full blocks by their content."""

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from magicdec.runtime.engine.block_tables import BlockTables


class BlockManager:
    """Hands out fixed-size blocks of KV slots to sequences.

    A block is in exactly one of three places: used (named by one or more tables), cached (named by none, but its
    content can still be found by hash; evicted least recently used first), or free. Only blocks that are full of
    committed tokens are ever published under a hash, so a shared block is never written to.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_blocks))  # a heap: low ids first, which keeps a sequence's blocks in few runs
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, array[int]] = {}
        self._hashes: dict[str, list[bytes]] = {}  # content hash of each published leading block of a sequence
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.num_free_blocks

    @property
    def owners(self) -> set[str]:
        """Who holds a table."""
        return set(self._tables)

    def table(self, owner: str) -> "array[int]":
        """The owner's block table, of 64-bit integers that numpy reads as they lie; not to be changed by the caller."""
        return self._tables[owner]

    def tables(self, owners: Sequence[str]) -> BlockTables:
        """The tables of these owners, to be read together."""
        return BlockTables([self._tables[owner] for owner in owners], self.block_size)

    def owns(self, owner: str) -> bool:
        """Whether the owner holds a table."""
        return owner in self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def slots(self, owner: str, start: int, stop: int) -> list[int]:
        """Physical slots of the owner's tokens start..stop-1."""
        table, size = self._tables[owner], self.block_size
        return [table[token // size] * size + token % size for token in range(start, stop)]

    def allocate(self, owner: str, token_ids: Sequence[int], num_tokens: int) -> int | None:
        """Give a new owner blocks for `num_tokens` tokens, of which `token_ids` are known.

        Returns how many leading tokens are already computed in reused blocks (always fewer than all known ones, so
        that there is a row to take logits from), or None, with nothing changed, when there are too few free blocks.
        """
        assert owner not in self._tables
        reused = self._match(token_ids)
        fresh = self.blocks_for(num_tokens) - len(reused)
        revived = sum(self._ref_counts[block] == 0 for _, block in reused)
        if fresh + revived > self.num_free_blocks:
            return None
        table = self._tables[owner] = array("q")
        for _, block in reused:
            self._cached.pop(block, None)
            self._ref_counts[block] += 1
            table.append(block)
        self._hashes[owner] = [digest for digest, _ in reused]
        table.extend(self._take() for _ in range(fresh))
        return len(reused) * self.block_size

    def extend(self, owner: str, num_tokens: int) -> bool:
        """Grow the owner's table to hold `num_tokens` tokens; False, with nothing changed, when blocks run out."""
        table = self._tables[owner]
        fresh = self.blocks_for(num_tokens) - len(table)
        if fresh <= 0:
            return True
        if fresh > self.num_free_blocks:
            return False
        table.extend(self._take() for _ in range(fresh))
        return True

    def publish(self, owner: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the owner's full blocks of committed tokens findable by content."""
        if not self.prefix_caching:
            return
        hashes, size = self._hashes[owner], self.block_size
        for index in range(len(hashes), num_computed_tokens // size):
            digest = _digest(hashes[-1] if hashes else b"", token_ids[index * size : (index + 1) * size])
            hashes.append(digest)
            block = self._tables[owner][index]
            if digest not in self._block_of_hash:  # an equal block of another sequence stays the one to be found
                self._block_of_hash[digest] = block
                self._hash_of_block[block] = digest

    def free(self, owner: str) -> None:
        """Give back all blocks of an owner; last blocks first, so that prefixes stay findable longest."""
        for block in reversed(self._tables.pop(owner)):
            self._release(block)
        self._hashes.pop(owner)

    def check_integrity(self) -> None:
        """Assert the invariant: every block in one place, and reference counts equal to the tables' entries."""
        counts = [0] * self.num_blocks
        for table in self._tables.values():
            assert len(set(table)) == len(table), "a table names a block twice"
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the tables"
        idle = set(self._free) | set(self._cached)
        assert len(idle) == len(self._free) + len(self._cached), "a block is free twice"
        assert idle == {block for block, count in enumerate(counts) if count == 0}, "a block is lost or freed in use"
        assert self._hash_of_block == {block: digest for digest, block in self._block_of_hash.items()}
        assert not set(self._free) & set(self._hash_of_block), "a free block can still be found by content"
        assert set(self._cached) <= set(self._hash_of_block)

    def _match(self, token_ids: Sequence[int]) -> list[tuple[bytes, int]]:
        """The longest chain of published blocks that holds a proper prefix of the tokens."""
        found: list[tuple[bytes, int]] = []
        if not self.prefix_caching:
            return found
        size, parent = self.block_size, b""
        for index in range((len(token_ids) - 1) // size):
            parent = _digest(parent, token_ids[index * size : (index + 1) * size])
            block = self._block_of_hash.get(parent)
            if block is None:
                break
            found.append((parent, block))
        return found

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of_hash[self._hash_of_block.pop(block)]
        self._ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if block in self._hash_of_block:
            self._cached[block] = None
        else:
            heapq.heappush(self._free, block)


def _digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Content hash of a block and all before it; cryptographic, so that a collision is not a case to handle."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()
