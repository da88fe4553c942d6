"""The block tables of the sequences of one pass, side by side, so that all of them are read in a few operations."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from magicdec.plugins.model.inputs import ModelInput, flatten

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


def pack_views(
    tables: BlockTables,
    token_ids: Sequence[Sequence[int]],  # [B] new tokens of each sequence
    starts: Sequence[int],  # [B] position of the first of them
    num_logits: Sequence[int],  # [B] of the last so many
) -> ModelInput:
    """`pack` for sequences that are seen whole, through their own block tables and at their own positions."""
    first, counts = np.array(starts), np.array([len(each) for each in token_ids])
    ends = counts.cumsum()
    order = np.arange(len(counts))
    sequences = order.repeat(counts)  # [T]
    rows = np.arange(len(sequences))  # [T]
    positions = rows + (first + counts - ends)[sequences]
    num_blocks = -(-(first + counts) // tables.block_size)
    return ModelInput(
        input_ids=flatten(token_ids),
        positions=torch.from_numpy(positions),
        query_start_loc=torch.from_numpy(np.append(0, ends)),
        cache_lens=torch.from_numpy(first),
        block_table=torch.from_numpy(tables.views(order, num_blocks, 0, np.zeros_like(first))),
        slot_mapping=torch.from_numpy(tables.slots(sequences, positions)),
        logits_indices=torch.from_numpy((rows >= (ends - num_logits)[sequences]).nonzero()[0]),
    )
