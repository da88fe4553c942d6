"""What one forward pass is told: packed, ragged rows and the block table through which each sequence is seen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True)  # not frozen, which would make it several times as slow to make
class SequenceInput:
    """The rows that one sequence adds to a forward pass.

    A *view* is what the model may look at: the first `cache_len` entries that `block_table` names, followed by the
    new rows themselves. A target's view is the whole sequence; a draft's view is bounded (sinks and recent blocks).
    """

    token_ids: Sequence[int]  # [n] the new tokens
    positions: Sequence[int]  # [n] their rotary positions, never derived from cache_len
    cache_len: int  # entries of the view that stand in the cache already
    block_table: Sequence[int]  # physical block of each logical block of the view
    slot_mapping: Sequence[int]  # [n] the physical slot that each new row's key and value are written to
    num_logits: int  # logits are wanted for the last num_logits rows

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.positions) == len(self.slot_mapping) > 0
        assert 0 <= self.num_logits <= len(self.token_ids)


@dataclass(frozen=True)
class ModelInput:
    """One packed forward pass of B sequences, T rows and N wanted logits; host tensors of int64."""

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    query_start_loc: torch.Tensor  # [B + 1] rows of sequence b are query_start_loc[b] : query_start_loc[b + 1]
    cache_lens: torch.Tensor  # [B]
    block_table: torch.Tensor  # [B, max_blocks], unused entries are 0
    slot_mapping: torch.Tensor  # [T]
    logits_indices: torch.Tensor  # [N] rows whose logits are wanted, ascending


def pack(sequences: Sequence[SequenceInput]) -> ModelInput:
    """Concatenate the rows of all sequences, in order."""
    starts = [0, *itertools.accumulate(len(sequence.token_ids) for sequence in sequences)]
    width = max(len(sequence.block_table) for sequence in sequences)
    table = np.zeros((len(sequences), width), dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.block_table)] = sequence.block_table
    wanted = [range(end - sequence.num_logits, end) for end, sequence in zip(starts[1:], sequences, strict=True)]
    return ModelInput(
        input_ids=flatten([sequence.token_ids for sequence in sequences]),
        positions=flatten([sequence.positions for sequence in sequences]),
        query_start_loc=torch.tensor(starts, dtype=torch.int64),
        cache_lens=torch.tensor([sequence.cache_len for sequence in sequences], dtype=torch.int64),
        block_table=torch.from_numpy(table),
        slot_mapping=flatten([sequence.slot_mapping for sequence in sequences]),
        logits_indices=flatten(wanted),
    )


def flatten(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """All rows end to end, int64."""
    flat = np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int64)  # faster than PyTorch's own
    return torch.from_numpy(flat)
