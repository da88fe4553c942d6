"""Tiny engine pairs for whole runs: a random LLaMA, a draft that mostly agrees with it, and what drafts them."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from magicdec.builder.build import build_pair
from magicdec.pair.config import DraftConfig, PairConfig, QuantizationConfig, WeightOnly
from tests.support.tiny_models import write_tiny_checkpoint

Drafter = Literal["self", "ngram", "in_cache", "absolute"]
DRAFTERS: tuple[Drafter, ...] = ("self", "ngram", "in_cache", "absolute")
WINDOW, BLOCK = 32, 16


def tiny_pair(
    directory: Path,
    drafter: Drafter,
    *,
    max_seq_len: int = 1024,
    tp_size: int = 1,
    draft_tp: int | None = None,
    fp8: bool = False,
    weight_only: WeightOnly | None = None,
    **checkpoint: Any,
) -> Path:
    """Build a pair under `directory` (once) and return it. A window of 32 tokens in blocks of 16, 4 sinks.

    fp8: weights and KV of target and draft. weight_only: the draft's weights in int8 or int4, which the checkpoint's
    shape must allow.
    """
    output = directory / f"pair-{drafter}-{tp_size}-{draft_tp}{'-fp8' if fp8 else ''}-{weight_only}"
    if output.exists():
        return output
    target = write_tiny_checkpoint(directory / "target", **checkpoint)
    separate = drafter in ("in_cache", "absolute")
    draft = DraftConfig(
        kind="model" if separate else drafter,  # type: ignore[arg-type]
        window_size=WINDOW,
        max_draft_len=8,
        sink_positions=drafter if separate else None,  # type: ignore[arg-type]
        tp_size=draft_tp,
        kv_cache_dtype="fp8" if fp8 and separate else "auto",
    )
    config = PairConfig(
        name="tiny",
        target="random",
        draft=draft,
        dtype="float32",
        kv_cache_dtype="fp8" if fp8 else "auto",
        quantization=QuantizationConfig(
            target="fp8" if fp8 else "none", draft=weight_only or ("fp8" if fp8 and separate else None)
        ),
        block_size=BLOCK,
        max_batch_size=4,
        max_seq_len=max_seq_len,
        max_num_tokens=128,
        tp_size=tp_size,
    )
    source: Any = _blurred(target, directory / "draft") if separate else drafter
    return build_pair(target, source, config, output)


def _blurred(target: Path, directory: Path, noise: float = 0.05) -> Path:
    """A copy of a checkpoint with noise on its weights: a draft that agrees with the target most of the time."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    blurred = {n: w + noise * w.std() * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(blurred, directory / "model.safetensors")
    return directory
