"""Logits of a prompt, by an engine's runner over a scattered block table, and by transformers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.runners.torch_runner import TorchRunner

BLOCK_SIZE = 16


def runner_logits(target: Path, token_ids: list[int], *, chunks: tuple[int, ...] = (50, 41)) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size]: two chunks of prefill, then the rest one token at a time."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    runner = TorchRunner(target, num_blocks=num_blocks + 1, block_size=BLOCK_SIZE)
    backwards = list(range(num_blocks, 0, -1))
    table = backwards[::2] + backwards[1::2]  # every block but 0, out of order
    rows, start = [], 0
    for size in (*chunks, *[1] * (len(token_ids) - sum(chunks))):
        positions = list(range(start, start + size))
        sequence = SequenceInput(
            token_ids=token_ids[start : start + size],
            positions=positions,
            cache_len=start,
            block_table=table,
            slot_mapping=[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions],
            num_logits=size,
        )
        rows.append(runner.forward(pack([sequence])))
        start += size
    return torch.cat(rows)


def reference_logits(checkpoint: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits [len(token_ids), vocab_size] in float32, the whole prompt at once."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
