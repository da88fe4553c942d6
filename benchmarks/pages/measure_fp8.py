"""What FP8 costs in accuracy: builds SmolLM2 in four forms and writes the table of docs/fp8.md.

    python benchmarks/pages/measure_fp8.py

Text: Python's language topics. Calibration reads their first tokens, everything here is measured behind those.
"""

# ruff: noqa: E402 - threads are told how to wait before PyTorch starts them
import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from magicdec.threads import wait_politely

wait_politely()

import torch
from frame import DOCS, options_of
from measured_pages import (
    DRAFT_LENGTH,
    add_sizes,
    fill_as_measured,
    open_pair,
    sampled_acceptances,
    smollm2,
    unseen_tokens,
)

from magicdec.bench.comparison import machine
from magicdec.builder.build import build_pair
from magicdec.builder.calibrate import CALIBRATION_TOKENS
from magicdec.builder.config import load_config
from magicdec.pair.config import PairConfig
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.runners.torch_runner import TorchRunner

PAGE = DOCS / "fp8.md"
MARKS = "<!-- begin of measure_fp8.py's table -->", "<!-- end of the table -->"
# Name of each form, and whether weights and KV are FP8.
FORMS = {
    "bf16": (False, False),
    "FP8 weights": (True, False),
    "FP8 weights and KV": (True, True),
    "FP8 KV": (False, True),
}
SEQUENCE, BLOCK = 2048, 16


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--sequences", type=int, default=8, help=f"of {SEQUENCE} tokens each, for perplexity")
    add_sizes(options, seeds=5)
    args = options.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        fill_as_measured(PAGE, MARKS, measure(Path(directory), args))


def measure(directory: Path, args: argparse.Namespace) -> Iterator[str]:
    """Lines of the page, each as soon as it is measured."""
    checkpoint = smollm2()
    engines = {}
    for name, (weights, kv) in FORMS.items():
        engines[name] = build_pair(checkpoint, "self", form("self", weights, kv), directory / name)
    tokens = unseen_tokens(engines["bf16"])
    held_out = [tokens[start : start + SEQUENCE] for start in range(0, args.sequences * SEQUENCE, SEQUENCE)]
    rest = tokens[args.sequences * SEQUENCE :]
    prompts = [rest[index * args.prompt_tokens :][: args.prompt_tokens] for index in range(args.prompts)]
    yield "| | perplexity | against bf16 | same likeliest token | self-speculation | separate draft of a bf16 target |"
    yield "|---|---|---|---|---|---|"
    base_losses, base_top = evaluate(engines["bf16"], held_out)
    for name, (weights, kv) in FORMS.items():
        losses, top = (base_losses, base_top) if name == "bf16" else evaluate(engines[name], held_out)
        changes = [100 * (math.exp(loss - base) - 1) for loss, base in zip(losses, base_losses, strict=True)]
        change = 100 * (math.exp(statistics.mean(losses) - statistics.mean(base_losses)) - 1)
        pair = build_pair(checkpoint, checkpoint, form("model", weights, kv), directory / f"{name} draft")
        row = [
            name,
            f"{math.exp(statistics.mean(losses)):.3f}",
            "" if name == "bf16" else f"{change:+.2f} % ({min(changes):+.2f} to {max(changes):+.2f})",
            "" if name == "bf16" else f"{100 * (top == base_top).float().mean().item():.1f} %",
            sampled(engines[name], prompts, args),
            sampled(pair, prompts, args),
        ]
        yield f"| {' | '.join(row)} |"
    yield ""
    yield (
        f"Perplexity over {len(held_out)} sequences of {SEQUENCE:,} tokens that calibration (the first "
        f"{CALIBRATION_TOKENS:,} tokens of the text) has not seen; in brackets the lowest and highest change of one "
        f"sequence. Acceptance: share of {DRAFT_LENGTH} draft tokens a round that stay, sampling at temperature 1, "
        f"{args.prompts} prompts of {args.prompt_tokens:,} tokens and {args.output_tokens} output tokens each, window "
        f"512; median of {args.seeds} seeds, with the lowest and highest. Machine: {machine()}."
    )


def form(kind: str, weights: bool, kv: bool) -> PairConfig:
    """The shipped configuration; FP8 for the target in self-speculation, else for the draft of a bf16 target."""
    values: dict[str, Any] = load_config("smollm2-135m-self").model_dump()
    values["draft"]["kind"] = kind
    separate = kind == "model"
    if weights:
        values["quantization"]["draft" if separate else "target"] = "fp8"
    if kv:
        (values["draft"] if separate else values)["kv_cache_dtype"] = "fp8"
    return PairConfig.model_validate(values)


def evaluate(engine: Path, sequences: list[list[int]]) -> tuple[list[float], torch.Tensor]:
    """Mean negative log-likelihood of each sequence, and the likeliest token at every position of all."""
    runner = TorchRunner(engine / "target", num_blocks=SEQUENCE // BLOCK, block_size=BLOCK)
    losses, top = [], []
    for ids in sequences:
        row = list(range(SEQUENCE))
        table = list(range(SEQUENCE // BLOCK))
        logits = runner.forward(pack([SequenceInput(ids, row, 0, table, row, num_logits=SEQUENCE)]))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item())
        top.append(logits.argmax(-1))
    return losses, torch.cat(top)


def sampled(engine: Path, prompts: list[list[int]], args: argparse.Namespace) -> str:
    """Share of draft tokens that the target accepts: median, lowest and highest of the seeds."""
    rates = sampled_acceptances(open_pair(engine, args), prompts, args)
    return f"{statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})"


if __name__ == "__main__":
    main()
