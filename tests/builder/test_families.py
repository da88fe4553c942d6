"""Each family, from a Hugging Face checkpoint through the builder to the runner, against transformers' logits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.builder import storage
from magicdec.builder.checkpoints import gguf_source
from magicdec.builder.checkpoints.model_spec import ModelSpec, parse_config
from magicdec.builder.shard import OutputTensor, plan_rank
from tests.builder.checkpoints.tiny_gguf import write_tiny_gguf
from tests.builder.engines import build_target, rejoin
from tests.builder.logits import reference_logits, runner_logits
from tests.support.tiny_models import FAMILIES, Family, write_tiny_checkpoint

TOLERANCE = 1e-4
# Seven blocks of 16, as far as the longest wavelengths of the tiny models' rotary embedding.
PROMPT = [(7 * index * index + 3 * index) % 123 + 5 for index in range(112)]


def max_error(checkpoint: Path, target: Path) -> float:
    return float((runner_logits(target, PROMPT) - reference_logits(checkpoint, PROMPT)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tmp_path: Path, family: Family, num_kv_heads: int, tied: bool) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family, num_kv_heads=num_kv_heads, tied=tied)
    assert max_error(checkpoint, build_target(checkpoint, tmp_path / "engine")) < TOLERANCE


@pytest.mark.parametrize("family", ["llama3", "llama-linear"])
def test_logits_with_the_configuration_of_transformers_4(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family, config_style="v4", shards=2)
    assert max_error(checkpoint, build_target(checkpoint, tmp_path / "engine")) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_logits_where_heads_are_not_the_hidden_size_divided(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family, head_dim=12)
    assert max_error(checkpoint, build_target(checkpoint, tmp_path / "engine")) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_by_way_of_gguf(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family)
    target = build_target(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "engine")
    assert max_error(checkpoint, target) < TOLERANCE


@pytest.mark.parametrize("tp_size", [2, 4])
def test_logits_of_shards_joined_again(tmp_path: Path, tp_size: int) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "qwen2", vocab_size=130)
    single = build_target(checkpoint, tmp_path / "one")
    shards = build_target(checkpoint, tmp_path / "many", tp_size=tp_size)
    joined = rejoin(shards, json.loads((shards / "config.json").read_text()))
    names = list(load_file(single / "rank0.safetensors"))
    expected = reference_logits(checkpoint, PROMPT)
    weights = single / "rank0.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # gone: what is run from here on comes from the shards
    save_file({name: joined[name].contiguous() for name in names}, weights, metadata={"format": "pt"})
    fit_manifest(single)
    assert float((runner_logits(single, PROMPT) - expected).abs().max()) < TOLERANCE


def fit_manifest(directory: Path) -> None:
    """Record the size of a weights file that a test has written itself."""
    manifest = json.loads((directory / "engine.json").read_text())
    manifest["files"]["rank0.safetensors"]["bytes"] = (directory / "rank0.safetensors").stat().st_size
    (directory / "engine.json").write_text(json.dumps(manifest))


def renamed(swap: dict[str, str]) -> Callable[[ModelSpec, int, int], list[OutputTensor]]:
    """A plan in which source tensors have been mistaken for each other."""

    def faulty(spec: ModelSpec, rank: int, tp_size: int) -> list[OutputTensor]:
        return [
            replace(output, pieces=tuple(replace(piece, source=change(str(piece.source))) for piece in output.pieces))
            for output in plan_rank(spec, rank, tp_size)
        ]

    def change(name: str) -> str:
        for old, new in swap.items():
            if old in name:
                return name.replace(old, new)
        return name

    return faulty


SWAPS = {
    "gate and up": {"gate_proj": "up_proj", "up_proj": "gate_proj"},
    "keys and values": {"k_proj": "v_proj", "v_proj": "k_proj"},
    "query and key norms": {"q_norm": "k_norm", "k_norm": "q_norm"},
    "the norms of a layer": {
        "input_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "input_layernorm",
    },
    "two layers": {"layers.0.self_attn": "layers.1.self_attn", "layers.1.self_attn": "layers.0.self_attn"},
    "head and embedding": {"lm_head": "model.embed_tokens"},
}


@pytest.mark.parametrize("fault", SWAPS)
def test_tensors_mistaken_for_each_other_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    family: Family = "qwen3" if "query" in fault else "llama"
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family)
    monkeypatch.setattr(storage, "plan_rank", renamed(SWAPS[fault]))
    assert max_error(checkpoint, build_target(checkpoint, tmp_path / "engine")) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3", {"rotary_scaling": None}),
        ("llama-linear", {"rotary_scaling": None}),
        ("llama", {"rotary_base": 500000.0}),
        ("llama", {"norm_epsilon": 1e-1}),
    ],
)
def test_a_configuration_read_wrongly_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family, change: dict[str, Any]
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family)

    def misread(values: dict[str, Any], where: str, *, has_lm_head: bool) -> ModelSpec:
        return replace(parse_config(values, where, has_lm_head=has_lm_head), **change)

    monkeypatch.setattr("magicdec.builder.checkpoints.source.parse_config", misread)
    assert max_error(checkpoint, build_target(checkpoint, tmp_path / "engine")) > 100 * TOLERANCE


def test_a_missed_q_and_k_permutation_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    monkeypatch.setattr(gguf_source, "_interleaved_rows", lambda rows, _head_size: rows)
    target = build_target(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "engine")
    assert max_error(checkpoint, target) > 100 * TOLERANCE


def test_a_lost_bias_is_seen(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "qwen2")
    target = build_target(checkpoint, tmp_path / "engine")
    weights = load_file(target / "rank0.safetensors")
    zeroed = {name: torch.zeros_like(w) if name.endswith("qkv.bias") else w for name, w in weights.items()}
    save_file(zeroed, target / "rank0.safetensors")
    fit_manifest(target)
    assert max_error(checkpoint, target) > 100 * TOLERANCE
