"""Packed passes: what is computed for all sequences at once is what each one alone would be given."""

import random
from dataclasses import fields

import numpy as np
import pytest
import torch

from magicdec.runtime.block_manager import BlockManager
from magicdec.runtime.model_input import ModelInput, SequenceInput, pack, pack_views


@pytest.mark.parametrize("seed", range(40))
def test_views_are_packed_as_their_sequences_one_by_one(seed: int) -> None:
    """Any lengths, tables that are longer than what is read, and views that leave blocks out behind the sinks."""
    rng = random.Random(seed)
    size, sinks = rng.choice([1, 2, 16]), rng.randrange(3)
    blocks = BlockManager(500, size)
    rows: list[SequenceInput] = []
    skipped: list[int] = []
    for index in range(rng.randrange(1, 6)):
        start, count = rng.randrange(40), rng.randrange(1, 6)
        assert blocks.allocate(str(index), [], start + count + rng.randrange(20)) is not None
        table, num_blocks = blocks.table(str(index)), -(-(start + count) // size)
        skip = rng.randrange(max(1, start // size - sinks + 1))
        row = SequenceInput(
            token_ids=[rng.randrange(99) for _ in range(count)],
            positions=range(start, start + count),
            cache_len=start - skip * size,
            block_table=(table[:sinks] + table[sinks + skip :])[: num_blocks - skip],
            slot_mapping=[table[i // size] * size + i % size for i in range(start, start + count)],
            num_logits=rng.randrange(count + 1),
        )
        rows.append(row)
        skipped.append(skip)
    found = pack_views(
        blocks.tables([str(index) for index in range(len(rows))]),
        [row.token_ids for row in rows],
        [row.positions[0] for row in rows],
        [row.num_logits for row in rows],
        sinks,
        np.array(skipped),
    )
    _assert_same(found, pack(rows))


def _assert_same(found: ModelInput, expected: ModelInput) -> None:
    for field in fields(ModelInput):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name
