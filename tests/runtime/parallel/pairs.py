"""Tiny pairs that are built for several ranks, and passes and requests to run on them."""

from pathlib import Path
from typing import Any

import torch

from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.runners.opening import RunnerSpec
from tests.e2e import test_exactness
from tests.support.engines import Drafter, tiny_pair
from tests.support.tiny_models import Family

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
BLOCK_SIZE = 16
NUM_BLOCKS = 12
# Greedy and seeded requests of all kinds, from one token to several windows.
PROMPTS = test_exactness.PROMPTS[:4]
PARAMS = [params.model_copy(update={"max_tokens": 40}) for params in test_exactness.PARAMS[:4]]
VOCAB_SIZE = 129  # no multiple of 2 or 4: the output matrix is padded


def build(
    directory: Path, drafter: Drafter, tp_size: int, *, family: Family = "llama", draft_tp: int | None = None
) -> Path:
    """A pair of `tp_size` ranks; those of one family are built from the same checkpoints. Built once."""
    return tiny_pair(
        directory / family, drafter, tp_size=tp_size, draft_tp=draft_tp, family=family, vocab_size=VOCAB_SIZE
    )


def float64_spec(engine: Path) -> RunnerSpec:
    """The target of a pair, computed in float64."""
    return RunnerSpec(engine / "target", NUM_BLOCKS, BLOCK_SIZE, torch.float64)


def passes() -> list[ModelInput]:
    """Two sequences over scattered blocks: prompt chunks together, then both go on by several tokens and by one."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 60), generator=generator).tolist()
    tables = [[7, 2, 11, 4], [3, 9, 0, 8]]
    steps = [((0, 20), (0, 33)), ((20, 25), (33, 34)), ((25, 48), (34, 60))]
    return [pack([_rows(tokens[i], tables[i], start, stop) for i, (start, stop) in enumerate(step)]) for step in steps]


def _rows(tokens: list[int], table: list[int], start: int, stop: int) -> SequenceInput:
    return SequenceInput(
        token_ids=tokens[start:stop],
        positions=range(start, stop),
        cache_len=start,
        block_table=table,
        slot_mapping=[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)],
        num_logits=stop - start,
    )


def summary(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """What two ways of decoding must agree in, and how much work was undone."""
    return [
        {
            "token_ids": out.outputs[0].token_ids,
            "text": out.outputs[0].text,
            "finish_reason": out.outputs[0].finish_reason,
            "accepted": out.metrics.num_accepted_tokens,
            "preempted": out.metrics.num_preemptions,
        }
        for out in outputs
    ]
