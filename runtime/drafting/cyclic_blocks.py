"""The draft's bounded cache of one sequence: whole sink blocks, and recent blocks that are reused in a circle."""

from collections.abc import Sequence

from magicdec.pair.budget import num_sink_blocks


class CyclicBlocks:
    """Integer arithmetic on a block table; nothing is copied when the window moves.

    The view, in logical order, is `[sink blocks | recent blocks, oldest first]`. View entry v < sinks holds token v,
    a later entry holds token `num_evicted_tokens + v`. With sinks that follow the window (StreamingLLM's in-cache
    positions, arXiv 2309.17453) *every* entry v stands at rotary position `num_evicted_tokens + v`.

    Two spare recent blocks make a rewind of up to `block_size` tokens safe: what is overwritten by a rotation is
    always older than `window_size` tokens before any place that a rewind can go back to.
    """

    def __init__(self, blocks: Sequence[int], num_sink_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_sink_blocks = num_sink_blocks(num_sink_tokens, block_size)
        self._sinks = list(blocks[: self.num_sink_blocks])
        self._recent = list(blocks[self.num_sink_blocks :])
        self.num_tokens = 0  # tokens of the sequence up to which the cache is valid
        self.num_evicted_tokens = 0  # always a multiple of block_size

    @property
    def block_table(self) -> list[int]:
        """Physical blocks in logical order."""
        return self._sinks + self._recent

    @property
    def cache_len(self) -> int:
        """Valid entries of the view."""
        return self.num_tokens - self.num_evicted_tokens

    @property
    def capacity(self) -> int:
        """Entries that the view can hold; the draft budget in tokens."""
        return (len(self._sinks) + len(self._recent)) * self.block_size

    def start_at(self, num_evicted_tokens: int) -> None:
        """Empty the cache; the next tokens appended are the sinks and then token `num_evicted_tokens + sinks`."""
        assert num_evicted_tokens % self.block_size == 0
        self.num_tokens = self.num_evicted_tokens = num_evicted_tokens

    def append(self, num_tokens: int) -> list[int]:
        """Make room for new tokens, rotating as needed; returns their physical slots.

        To a cache that is not empty at most all recent blocks but one: more would rotate past the sinks.
        """
        most = (len(self._recent) - 1) * self.block_size if self.cache_len else self.capacity
        assert 0 < num_tokens <= most
        while self.cache_len + num_tokens > self.capacity:
            self._rotate()
        first, size, table = self.cache_len, self.block_size, self.block_table
        self.num_tokens += num_tokens
        return [table[entry // size] * size + entry % size for entry in range(first, first + num_tokens)]

    def rewind(self, num_tokens: int) -> None:
        """Forget all tokens from `num_tokens` on; only a length changes."""
        assert self.num_evicted_tokens + self.num_sink_blocks * self.block_size <= num_tokens or (
            self.num_evicted_tokens == 0
        ), "a rewind reaches tokens that were evicted"
        self.num_tokens = min(self.num_tokens, num_tokens)

    def _rotate(self) -> None:
        """The oldest recent block becomes the newest."""
        self._recent.append(self._recent.pop(0))
        self.num_evicted_tokens += self.block_size
