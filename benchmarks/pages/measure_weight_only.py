"""What int8 and int4 drafts cost in acceptance, with SmolLM2 drafting for itself: writes docs/weight-only.md's table.

    python benchmarks/pages/measure_weight_only.py

Text: Python's language topics. Calibration reads their first tokens, the prompts come from behind those.
"""

# ruff: noqa: E402 - threads are told how to wait before PyTorch starts them
import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from magicdec.threads import wait_politely

wait_politely()

import torch
from frame import DOCS, options_of
from measured_pages import (
    DRAFT_LENGTH,
    acceptance,
    add_sizes,
    fill_as_measured,
    open_pair,
    sampled_acceptances,
    smollm2,
    unseen_tokens,
)
from safetensors.torch import save_file

from magicdec.bench.comparison import machine
from magicdec.builder import observers as watches
from magicdec.builder.build import build_pair
from magicdec.builder.checkpoints.source import open_source
from magicdec.builder.config import load_config, resolve_config
from magicdec.pair.config import WeightQuantization
from magicdec.plugins.weight_only import GROUP, int4_scales, int8_scales, to_int4, to_int8
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams

PAGE = DOCS / "weight-only.md"
MARKS = "<!-- begin of measure_weight_only.py's table -->", "<!-- end of the table -->"
WINDOW = 512
PUBLISHED, UNROUNDED = "as published (Q4_1)", "unrounded"
# Of each row: the checkpoint, the draft, and whether that is rounded to the nearest instead of by calibration.
ROWS: list[tuple[str, WeightQuantization, bool]] = [
    (PUBLISHED, "none", False),
    (PUBLISHED, "int8", False),
    (PUBLISHED, "int4", False),
    (UNROUNDED, "none", False),
    (UNROUNDED, "int8", False),
    (UNROUNDED, "int4", False),
    (UNROUNDED, "int4", True),
]


def main() -> None:
    options = options_of(__doc__)
    add_sizes(options, seeds=4)
    args = options.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        fill_as_measured(PAGE, MARKS, measure(Path(directory), args))


def measure(directory: Path, args: argparse.Namespace) -> Iterator[str]:
    """Lines of the page, each as soon as it is measured."""
    published = smollm2()
    plain = build(published, directory / "plain", "none")
    checkpoints = {PUBLISHED: published, UNROUNDED: unrounded(published, plain, directory / "unrounded")}
    prompts = texts(plain, args)
    yield "| checkpoint | draft | MB of weights | greedy | temperature 1 |"
    yield "|---|---|---|---|---|"
    for name, kind, nearest in ROWS:
        with rounding_to_the_nearest() if nearest else nullcontext():
            engine = build(checkpoints[name], directory / "engine", kind)
        yield row(name, kind, nearest, engine, prompts, args)
    yield ""
    yield (
        f"Share of {DRAFT_LENGTH} draft tokens a round that stay: {args.prompts} prompts of {args.prompt_tokens:,} "
        f"tokens that calibration has not seen, {args.output_tokens} output tokens each, window {WINDOW}; sampled: "
        f"mean of {args.seeds} seeds, with its standard error. Machine: {machine()}."
    )


def texts(engine: Path, args: argparse.Namespace) -> list[list[int]]:
    """Prompts that calibration has not seen."""
    tokens = unseen_tokens(engine)
    return [tokens[index * args.prompt_tokens :][: args.prompt_tokens] for index in range(args.prompts)]


def row(
    name: str,
    kind: WeightQuantization,
    nearest: bool,
    engine: Path,
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> str:
    """One line of the table."""
    llm = open_pair(engine, args)
    weights = (engine / ("target" if kind == "none" else "draft") / "rank0.safetensors").stat().st_size
    form = "bf16, the target itself" if kind == "none" else kind
    greedy = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    cells = [
        name,
        f"{form}, rounded to the nearest" if nearest else form,
        f"{weights / 1e6:.0f}",
        f"{acceptance(llm, prompts, [greedy] * len(prompts)):.3f}",
        sampled(llm, prompts, args),
    ]
    return f"| {' | '.join(cells)} |"


def build(checkpoint: Path, output: Path, kind: WeightQuantization) -> Path:
    """Self-speculation with a draft of this kind."""
    config = resolve_config(load_config("smollm2-135m-self"), kind="self", quantize_draft=kind)
    return build_pair(checkpoint, "self", config, output, overwrite=True)


def unrounded(published: Path, built: Path, directory: Path) -> Path:
    """The same model as a checkpoint in float32 that no grid of 16 steps fits: the published one had been rounded.

    Each weight is moved by up to half a step of its group, evenly at random, to where it may have been.
    """
    directory.mkdir()
    source, generator = open_source(published), torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in source.shapes.items():
        tensor = source.read(name, (0, shape[0])).float()
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            steps = int4_scales(tensor)[0].float().repeat_interleave(GROUP, dim=1)
            tensor = tensor + steps * (torch.rand(shape, generator=generator) - 0.5)
        tensors[name] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")
    spec = source.spec
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_epsilon,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rotary_base,
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in (built / "target").glob("*token*.json"):
        shutil.copy(path, directory)
    source.close()
    return directory


@contextmanager
def rounding_to_the_nearest() -> Iterator[None]:
    """Builds in this block leave calibration out."""
    before = watches.round_to_int8, watches.round_to_int4

    def to_nearest_int8(weight: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        return to_int8(weight, int8_scales(weight)), int8_scales(weight)

    def to_nearest_int4(weight: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales, offsets = int4_scales(weight)
        return to_int4(weight, scales, offsets), scales, offsets

    watches.round_to_int8, watches.round_to_int4 = to_nearest_int8, to_nearest_int4
    try:
        yield
    finally:
        watches.round_to_int8, watches.round_to_int4 = before


def sampled(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> str:
    """Mean and standard error over the seeds."""
    rates = sampled_acceptances(llm, prompts, args)
    error = statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 0.0
    return f"{statistics.mean(rates):.3f} +- {error:.3f}"


if __name__ == "__main__":
    main()
