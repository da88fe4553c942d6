"""Host time of an engine step with a model that costs nothing: scheduling, caches, packing, sampling, acceptance.

    python benchmarks/host.py --batch 64 --draft-len 4 --context 2048 --json host.json

Times are milliseconds a step, medians over the measured steps; `least` is the fastest whole step, which other work on
the machine has disturbed least. What grows from the small vocabulary to the large one is
arithmetic over the vocabulary, which belongs to the device that computes the logits. One thread, since that is what a
host has beside a model.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from magicdec.pair.budget import num_cyclic_blocks
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.views import CyclicView, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.scheduler import FixedDrafts, Scheduler
from magicdec.runtime.sampling_params import SamplingParams

PARTS = ("schedule", "propose", "verify", "accept", "commit", "rest")
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "rejection": {"temperature": 1.0, "acceptance": "rejection"},
    "coupled": {"temperature": 1.0, "acceptance": "coupled"},
}
WARMUP = 3


class FreeRunner:
    """A `ModelRunner` that computes nothing: every row has the same logits, made once. So every draft is accepted."""

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        row = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
        self._logits = row.repeat(max_rows, 1)  # real memory, as a model would leave behind

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Views of the same rows."""
        return self._logits[: len(inputs.logits_indices)]

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """No keys."""
        assert len(slots) == len(positions)
        return torch.empty(0)

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Nothing to write."""


class Stopwatch:
    """Seconds by part; a part inside another is taken out of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []  # seconds spent in inner parts, for each part that runs

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time `owner.name` as `part` from now on."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[part] += spent - self._open.pop()
                if self._open:
                    self._open[-1] += spent

        setattr(owner, name, timed)


def build(vocab_size: int, drafter: str, batch: int, context: int, draft_len: int, max_tokens: int) -> Engine:
    """An engine of self-speculation or of a separate draft, whose models are free."""
    size, window, sinks = 16, 512, 4
    blocks_each = -(-(context + max_tokens + draft_len + 1) // size)
    runner = FreeRunner(vocab_size, batch * blocks_each, size, batch * (draft_len + 1))
    blocks = BlockManager(runner.num_blocks, size, prefix_caching=True)
    cache: TargetWindow | CyclicView
    if drafter == "self":
        cache, draft = TargetWindow(blocks, window_size=window, num_sink_tokens=sinks), runner
    else:
        each = num_cyclic_blocks(sinks, window, size, draft_len)
        draft = FreeRunner(vocab_size, batch * each, size, batch)
        cache = CyclicView(
            draft, window_size=window, num_sink_tokens=sinks, num_blocks_per_request=each, sink_positions="in_cache"
        )
    engine = Engine(
        runner,
        blocks,
        Scheduler(blocks, max_batch_size=batch, max_num_tokens=8192),
        max_seq_len=blocks_each * size,
        max_draft_len=draft_len,
        eos_token_ids=[],
    )
    engine.use(Drafting(FixedDrafts(lambda _: draft_len), ModelProposer(draft, cache)))
    return engine


def measure(args: argparse.Namespace, vocab_size: int, sampling: str) -> dict[str, float]:
    """Milliseconds of each part of a step, medians."""
    max_tokens = (args.steps + WARMUP + args.batch) * (args.draft_len + 1)  # so that none ends while others start
    engine = build(vocab_size, args.drafter, args.batch, args.context, args.draft_len, max_tokens)
    generator = torch.Generator().manual_seed(1)
    for index in range(args.batch):
        prompt = torch.randint(vocab_size, (args.context,), generator=generator).tolist()
        params = SamplingParams(max_tokens=max_tokens, seed=index, **SAMPLING[sampling])  # type: ignore[arg-type]
        engine.add_request(str(index), prompt, params)
    while any(request.num_pending_tokens != 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    rows = [dict(parts) for parts in _steps(engine, args.steps)]
    medians = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    steps = [sum(row.values()) for row in rows]
    return {**medians, "step": statistics.median(steps), "least": min(steps)}


def _steps(engine: Engine, count: int) -> Iterator[dict[str, float]]:
    watch = Stopwatch()
    watch.wrap(engine, "_schedule", "schedule")
    watch.wrap(engine.drafting.proposer, "propose", "propose")
    watch.wrap(engine, "_score", "verify")
    watch.wrap(engine, "_accept", "accept")
    watch.wrap(engine, "_commit", "commit")
    watch.wrap(engine, "step", "rest")
    for index in range(WARMUP + count):
        watch.seconds.clear()
        engine.step()
        if index >= WARMUP:
            yield {part: 1e3 * watch.seconds[part] for part in PARTS}


def _growth(sampling: str, results: list[dict[str, Any]]) -> str:
    """Which parts take longer with the largest vocabulary than with the smallest."""
    ordered = sorted(results, key=lambda each: each["vocab_size"])
    small, large = ordered[0]["milliseconds"], ordered[-1]["milliseconds"]
    grown = [f"{part} +{large[part] - small[part]:.1f} ms" for part in PARTS if large[part] > small[part] + 0.1]
    return f"{sampling}: with the vocabulary grow {', '.join(grown) or 'none'}"


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--drafter", choices=("self", "model"), default="self")
    parser.add_argument("--vocab", type=int, nargs="+", default=[64, 49152])
    parser.add_argument("--sampling", choices=tuple(SAMPLING), nargs="+", default=list(SAMPLING))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    table = Table(
        "sampling", "vocabulary", *PARTS, "step", "least", title=f"host milliseconds a step, batch {args.batch}"
    )
    for sampling in args.sampling:
        for vocab_size in args.vocab:
            times = measure(args, vocab_size, sampling)
            results.append({"sampling": sampling, "vocab_size": vocab_size, "milliseconds": times})
            table.add_row(sampling, f"{vocab_size:,}", *(f"{times[part]:.2f}" for part in (*PARTS, "step", "least")))
    console = Console()
    console.print(table)
    for sampling in args.sampling:
        console.print(_growth(sampling, [each for each in results if each["sampling"] == sampling]))
    if args.json is not None:
        setting = {key: getattr(args, key) for key in ("batch", "draft_len", "context", "steps", "drafter")}
        args.json.write_text(json.dumps({"setting": setting, "results": results}, indent=2))


if __name__ == "__main__":
    main()
