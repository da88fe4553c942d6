"""Packed passes: what is computed for all sequences at once is what each one alone would be given."""

import random
from dataclasses import fields

import pytest
import torch

from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.block_tables import pack_views


@pytest.mark.parametrize("seed", range(40))
def test_views_are_packed_as_their_sequences_one_by_one(seed: int) -> None:
    """Any lengths, and tables that are longer than what is read."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 16])
    blocks = BlockManager(500, size)
    rows: list[SequenceInput] = []
    for index in range(rng.randrange(1, 6)):
        start, count = rng.randrange(40), rng.randrange(1, 6)
        assert blocks.allocate(str(index), [], start + count + rng.randrange(20)) is not None
        table, num_blocks = blocks.table(str(index)), -(-(start + count) // size)
        row = SequenceInput(
            token_ids=[rng.randrange(99) for _ in range(count)],
            positions=range(start, start + count),
            cache_len=start,
            block_table=table[:num_blocks],
            slot_mapping=[table[i // size] * size + i % size for i in range(start, start + count)],
            num_logits=rng.randrange(count + 1),
        )
        rows.append(row)
    found = pack_views(
        blocks.tables([str(index) for index in range(len(rows))]),
        [row.token_ids for row in rows],
        [row.positions[0] for row in rows],
        [row.num_logits for row in rows],
    )
    _assert_same(found, pack(rows))


def _assert_same(found: ModelInput, expected: ModelInput) -> None:
    for field in fields(ModelInput):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name
