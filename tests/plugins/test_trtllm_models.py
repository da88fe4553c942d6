"""Networks with explicit positions, built and executed by the stand-in, give TorchRunner's logits."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.builder.build import build_pair
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.runners.torch_runner import TorchRunner
from tests.builder.engines import tiny_config
from tests.support.tiny_models import FAMILIES, Family, write_tiny_checkpoint
from tests.support.trtllm_driver import Driver

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


def compiled(directory: Path, family: Family, **settings: Any) -> Path:
    """A target engine folder for the stand-in."""
    checkpoint = write_tiny_checkpoint(directory / "checkpoint", family, tied=family == "qwen2")
    config = tiny_config(backend="trtllm", max_num_tokens=256, **settings)
    return build_pair(checkpoint, "self", config, directory / "pair", workers=0) / "target"


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


FP8 = {"quantization": {"target": "fp8"}}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_fp8_logits_equal_torch_runner(tmp_path: Path, standin: Any, family: Family, cache: str) -> None:
    """The same FP8 numbers and scales; sums in another order may round a value to its neighbour, rarely."""
    target = compiled(tmp_path, family, kv_cache_dtype=cache, **FP8)
    driver, runner = Driver(standin, target, NUM_BLOCKS), TorchRunner(target, NUM_BLOCKS, BLOCK)
    assert driver.pool.element_size() == (1 if cache == "fp8" else 4)
    errors = [(driver.run(step) - runner.forward(pack(step))).abs() for step in STEPS]
    assert torch.cat(errors).median() < 1e-5
    assert torch.cat(errors).max() < 0.3


@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("llama", 2, {}),
        ("llama", 4, {}),  # more ranks than KV heads
        ("qwen2", 2, {}),
        ("llama", 2, FP8 | {"kv_cache_dtype": "fp8"}),
        ("qwen3", 2, FP8 | {"kv_cache_dtype": "fp8"}),
    ],
)
def test_ranks_give_the_logits_of_one(
    tmp_path: Path, standin: Any, family: Family, size: int, settings: dict[str, Any]
) -> None:
    """All ranks' engines in threads, exchanging through a barrier; each has whole rows of logits."""
    one = Driver(standin, compiled(tmp_path / "one", family, **settings), NUM_BLOCKS)
    target = compiled(tmp_path / "several", family, tp_size=size, **settings)
    ranks = [Driver(standin, target, NUM_BLOCKS, rank=rank) for rank in range(size)]
    exchange = Exchange(len(ranks))
    standin.standin_collective(exchange)

    def run(rank: int) -> torch.Tensor:
        exchange.thread.rank = rank
        return ranks[rank].run(step)

    with ThreadPoolExecutor(size) as pool:
        for step in STEPS:
            first, *others = pool.map(run, range(size))
            assert all(torch.equal(other, first) for other in others)
            error = (first - one.run(step)).abs()
            assert error.median() < 1e-5
            assert error.max() < (0.3 if settings else 1e-5)
    standin.standin_collective(None)


class Exchange:
    """gather() of threads that call it in step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: dict[int, torch.Tensor] = {}
        self.thread = threading.local()

    def __call__(self, x: torch.Tensor, group: Sequence[int]) -> list[torch.Tensor]:
        """The calling thread has said which rank it is."""
        assert list(group) == list(range(self.size))
        self.parts[self.thread.rank] = x
        self.barrier.wait()
        parts = [self.parts[rank] for rank in sorted(self.parts)]
        self.barrier.wait()
        return parts
