"""The paged attention kernel in SmolLM2's shape beside one read of the same memory and PyTorch's own attention.

    python benchmarks/attention.py --contexts 8192 32768 --batch 1 4 8 --rows 1 3 5 --json attention.json

Times are milliseconds a layer, medians over interleaved rounds, and ratios are medians of each round's own: a server's
memory is faster in some minutes than in others. Each round goes through layers of distinct memory, so that no cache
holds them. The kernel is called as the native decoding step calls it, with arguments that are made once. `read` reads
the keys and values once with the same threads. Aims: 3 rows at most 1.4 and 5 rows at most 2.0 times as long as 1 row,
and 1 row at 75 % of the read's bandwidth or more.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from magicdec.plugins.cpu.attention import PagedSequences, kernel_args, run_kernel
from magicdec.plugins.cpu.library import best_isa, native, use_huge_pages

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
POOL_BYTES = 256 << 20  # of all layers together, at least
SDPA_ROUNDS = 3


@dataclass
class Case:
    """Sequences of one context length, their caches in several layers of memory."""

    library: ctypes.CDLL
    batch: int
    context: int
    fragmented: bool

    def __post_init__(self) -> None:
        blocks = -(-self.context // BLOCK_SIZE)
        shape = (2, KV_HEADS, self.batch * blocks * BLOCK_SIZE, HEAD_SIZE)
        first = torch.randn(shape, dtype=torch.bfloat16)
        count = max(2, POOL_BYTES // first.nbytes)
        pool = use_huge_pages(torch.empty(count, *shape, dtype=torch.bfloat16))  # as `KVCache` has its own
        self.layers = list(pool.copy_(first).unbind())
        order = torch.randperm(self.batch * blocks) if self.fragmented else torch.arange(self.batch * blocks)
        self.blocks: list[list[int]] = order.view(self.batch, blocks).tolist()

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer."""
        return self.layers[0].nbytes

    def attend(self, rows: int) -> Callable[[int], None]:
        """The kernel for the last `rows` rows of each sequence, by layer."""
        starts = [rows * index for index in range(self.batch + 1)]
        sequences = PagedSequences(starts, [self.context - rows] * self.batch, self.blocks, BLOCK_SIZE)
        query = torch.randn(self.batch * rows, HEADS, HEAD_SIZE, dtype=torch.bfloat16) * HEAD_SIZE**-0.5
        out = torch.empty_like(query)
        args = [kernel_args(query, out, *layer, sequences) for layer in self.layers]
        return lambda layer: run_kernel(self.library, args[layer])

    def read(self, layer: int) -> None:
        """Once through a layer's memory."""
        self.library.magicdec_read_bytes(self.layers[layer].data_ptr(), self.layer_bytes)

    def sdpa(self, rows: int) -> Callable[[int], torch.Tensor]:
        """PyTorch's attention; it knows no pages, so the caches are taken as if each stood in one piece."""
        query = torch.randn(self.batch, HEADS, rows, HEAD_SIZE, dtype=torch.bfloat16) * HEAD_SIZE**-0.5
        mask = torch.ones(rows, self.context, dtype=torch.bool).tril(self.context - rows) if rows > 1 else None

        def run(layer: int) -> torch.Tensor:
            caches = self.layers[layer].view(2, KV_HEADS, self.batch, -1, HEAD_SIZE)
            keys, values = caches[..., : self.context, :].transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=1.0, enable_gqa=True
            )

        return run


def milliseconds(run: Callable[[int], Any], num_layers: int) -> float:
    """A layer's mean time in one round through the layers."""
    start = time.perf_counter()
    for layer in range(num_layers):
        run(layer)
    return 1e3 * (time.perf_counter() - start) / num_layers


def ratio(above: list[float], below: list[float]) -> float:
    """Median over the rounds, the first one apart: within a round the machine is the same."""
    return statistics.median(a / b for a, b in zip(above[1:], below[1:], strict=True))


def measure(case: Case, rows: list[int], rounds: int) -> dict[str, Any]:
    """Medians and spreads by name, and the ratios that the aims are about."""
    runs = {f"{count} rows": case.attend(count) for count in rows}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for name, run in [("read", case.read), *runs.items()]:
            times[name].append(milliseconds(run, len(case.layers)))
    for _ in range(SDPA_ROUNDS + 1):  # afterwards: PyTorch's threads keep the cores busy for a while
        for count in (rows[0], rows[-1]):
            times[f"sdpa {count} rows"].append(milliseconds(case.sdpa(count), 1))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}  # the first round warms up
    one = f"{rows[0]} rows"
    return {
        "batch": case.batch,
        "context": case.context,
        "layer_bytes": case.layer_bytes,
        "milliseconds": medians,
        "spread": {name: [min(found[1:]), max(found[1:])] for name, found in times.items()},
        "gigabytes_per_second": {name: case.layer_bytes / medians[name] / 1e6 for name in (*runs, "read")},
        "of_read_bandwidth": ratio(times["read"], times[one]),
        "times_one_row": {name: ratio(times[name], times[one]) for name in runs},
    }


def table(results: list[dict[str, Any]], rows: list[int]) -> Table:
    """One line for each case."""
    names, sdpa = [f"{count} rows" for count in rows], [f"sdpa {count} rows" for count in (rows[0], rows[-1])]
    shown = Table(title="Paged attention, bfloat16, ms a layer (times the first)")
    for heading in ("batch x context", "read", *names, "of read bandwidth", *sdpa):
        shown.add_column(heading, justify="right")
    for result in results:
        ms, speed = result["milliseconds"], result["gigabytes_per_second"]
        shown.add_row(
            f"{result['batch']} x {result['context']}",
            f"{ms['read']:.3f} ({speed['read']:.0f} GB/s)",
            *(f"{ms[name]:.3f} ({result['times_one_row'][name]:.2f})" for name in names),
            f"{100 * result['of_read_bandwidth']:.0f} %",
            *(f"{ms[name]:.1f}" for name in sdpa),
        )
    return shown


def main() -> None:
    """Measure the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 5], help="query rows of a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fragmented", action="store_true", help="blocks in random order, not in runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    library = native()
    if library is None:
        parser.exit(1, "the native library was not built, so there is nothing to measure\n")
    assert library is not None
    results = []
    for context in arguments.contexts:
        for batch in arguments.batch:
            case = Case(library, batch, context, arguments.fragmented)
            results.append(measure(case, arguments.rows, arguments.rounds))
    console = Console(width=140)
    console.print(table(results, arguments.rows))
    console.print(f"{best_isa(library)}, {library.magicdec_num_threads()} threads")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
