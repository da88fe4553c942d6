"""The block tables of the sequences of one pass, side by side, so that all of them are read in a few operations."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class BlockTables:
    """A copy of the tables of B sequences, for as long as they do not grow. Indices are of token or block, from 0."""

    def __init__(self, tables: Sequence["array[int]"], block_size: int) -> None:
        self.block_size = block_size
        self._blocks = np.frombuffer(b"".join(tables), dtype=np.int64)
        ends = np.cumsum([len(table) for table in tables])
        self._firsts: Ints = ends - [len(table) for table in tables]  # [B] where each table begins

    def slots(self, sequences: Ints, tokens: Ints) -> Ints:
        """Physical slot [n] of a token of a sequence each; anything where its table does not reach so far."""
        blocks = self._blocks.take(self._firsts[sequences] + tokens // self.block_size, mode="clip")
        slots: Ints = blocks * self.block_size + tokens % self.block_size
        return slots

    def views(self, sequences: Ints, num_blocks: Ints, num_sinks: int, num_skipped: Ints) -> Ints:
        """Blocks [n, most] of a view of a sequence each: the first `num_blocks`, less those skipped behind the sinks.

        Behind them stands 0.
        """
        widths = num_blocks - num_skipped
        columns = np.arange(widths.max())
        wanted = self._firsts[sequences][:, None] + columns
        wanted[:, num_sinks:] += num_skipped[:, None]
        blocks = self._blocks.take(wanted, mode="clip")  # of entries that stay unused, whatever stands next
        return np.where(columns < widths[:, None], blocks, 0)
