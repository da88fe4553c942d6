"""Networks with explicit positions, built and executed by the stand-in, give TorchRunner's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.builder.trtllm_compile import compile_engines
from magicdec.builder.trtllm_plan import plan_engines, read_checkpoint
from magicdec.runtime.model_input import SequenceInput, pack
from magicdec.runtime.torch_runner import TorchRunner
from tests.builder.engines import build_target, tiny_config
from tests.tiny_models import FAMILIES, Family, write_tiny_checkpoint
from tests.trtllm_driver import Driver

BLOCK, NUM_BLOCKS = 16, 12
LONG, SHORT = (7, 3, 9, 0, 5), (11, 2)  # block tables


def sequence(
    table: tuple[int, ...], first: int, num_tokens: int, num_logits: int, *, shift: int = 0, seed: int = 0
) -> SequenceInput:
    """Tokens first .. first + num_tokens of a view; shift: by how much positions are ahead of view entries."""
    generator = torch.Generator().manual_seed(seed + first)
    entries = range(first, first + num_tokens)
    return SequenceInput(
        token_ids=torch.randint(0, 128, (num_tokens,), generator=generator).tolist(),
        positions=[entry + shift for entry in entries],
        cache_len=first,
        block_table=table,
        slot_mapping=[table[entry // BLOCK] * BLOCK + entry % BLOCK for entry in entries],
        num_logits=num_logits,
    )


STEPS = [
    # Two prompts at once; then a chunk of one beside a generation step of the other; a chunk that wants no logits.
    [sequence(LONG, 0, 20, 1), sequence(SHORT, 0, 7, 1)],
    [sequence(SHORT, 7, 1, 1), sequence(LONG, 20, 13, 0)],
    # Verification of four drafts beside plain decoding, in an order that the engine has to turn round.
    [sequence(SHORT, 8, 1, 1), sequence(LONG, 33, 5, 5)],
    # Rewind by three, verify again; a prompt's last token alone.
    [sequence(LONG, 35, 4, 4, seed=1), sequence(SHORT, 9, 2, 2)],
    # A bounded view: the first block and the last ones, positions absolute, one new row, then several.
    [sequence((LONG[0], LONG[1], LONG[2]), 39, 1, 1, shift=64)],
    [sequence((LONG[0], LONG[2], LONG[3]), 24, 1, 1, shift=16), sequence(SHORT, 11, 1, 1)],
    [sequence((LONG[0], LONG[2], LONG[3]), 25, 3, 3, shift=16)],
]


def compiled(directory: Path, family: Family, **checkpoint: Any) -> Path:
    """A target engine folder for the stand-in."""
    target = build_target(write_tiny_checkpoint(directory / "checkpoint", family, **checkpoint), directory / "pair")
    plan = plan_engines(tiny_config(max_num_tokens=256), {"target": read_checkpoint(target)})["target"]
    compile_engines(target, plan, workers=0)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_torch_runner(tmp_path: Path, standin: Any, family: Family) -> None:
    target = compiled(tmp_path, family)
    driver, runner = Driver(standin, target, NUM_BLOCKS), TorchRunner(target, NUM_BLOCKS, BLOCK)
    for step in STEPS:
        torch.testing.assert_close(driver.run(step), runner.forward(pack(step)), atol=1e-5, rtol=1e-5)


def test_keys_lie_where_the_layout_says(tmp_path: Path, standin: Any) -> None:
    """[block, layer, 0 = keys | 1 = values, kv_head, token, head_size]."""
    target = compiled(tmp_path, "llama")
    driver, runner = Driver(standin, target, NUM_BLOCKS), TorchRunner(target, NUM_BLOCKS, BLOCK)
    step = [sequence(LONG, 0, 20, 1)]
    driver.run(step)
    runner.forward(pack(step))
    for entry in range(20):
        block, place = LONG[entry // BLOCK], entry % BLOCK
        for kv, cache in enumerate((runner.cache.keys, runner.cache.values)):
            torch.testing.assert_close(driver.pool[block, :, kv, :, place], cache[:, :, block * BLOCK + place])


def test_positions_are_an_input(tmp_path: Path, standin: Any) -> None:
    """The same tokens elsewhere: only distances count, so logits stay; with a hole between them they change."""
    driver = Driver(standin, compiled(tmp_path, "llama"), NUM_BLOCKS)
    near = driver.run([sequence(LONG, 0, 10, 10)])
    torch.testing.assert_close(driver.run([sequence(LONG, 0, 10, 10, shift=500)]), near, atol=1e-4, rtol=1e-4)
    torn = sequence(LONG, 0, 10, 10)
    torn = SequenceInput(torn.token_ids, [*range(5), *range(300, 305)], 0, LONG, torn.slot_mapping, 10)
    assert (driver.run([torn]) - near)[5:].abs().max() > 1e-2
