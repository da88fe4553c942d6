"""int8 and int4 drafts as they are built: what a draft/ folder holds, and that the runner computes with just that."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.builder import calibrate
from magicdec.builder.build import build_pair
from magicdec.builder.memory import memory_need
from magicdec.builder.storage import Storage, rank_bytes
from magicdec.errors import CheckpointError, ConfigError
from magicdec.pair.config import PairConfig, WeightOnly
from magicdec.pair.manifest import check_hashes, load_engine
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.plugins.model.torch_model import ModelConfig, TorchModel
from magicdec.plugins.weight_only import from_int4, from_int8
from magicdec.runtime.runners.torch_runner import TorchRunner
from tests.builder.engines import tiny_config
from tests.builder.published import PUBLISHED
from tests.support.tiny_models import Family, write_tiny_checkpoint

KINDS: tuple[WeightOnly, ...] = ("int8", "int4")
LINEAR = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
TABLES = ("transformer.vocab_embedding", "lm_head")


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has seen everything soon."""
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 512)


def build(directory: Path, kind: WeightOnly | None, family: Family = "llama", **checkpoint: Any) -> Path:
    checkpoint = {"intermediate_size": 64, **checkpoint}
    source = write_tiny_checkpoint(directory / "source", family, **checkpoint)
    config = tiny_config(quantization={"draft": kind})
    return build_pair(source, "self", config, directory / f"engine-{kind}")


def numbers(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a matrix of the file stands for."""
    data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weights_scaling_factor"]
    if data.dtype == torch.int8:
        return from_int8(data, scale, torch.float32)
    return from_int4(data, scale, tensors[f"{name}.weights_offset"], torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_stored_as_the_format_says(tmp_path: Path, kind: WeightOnly) -> None:
    engine = build(tmp_path, kind)
    plain = load_file(build(tmp_path, None) / "target/rank0.safetensors")
    tensors = load_file(engine / "draft/rank0.safetensors")
    matrices = [f"transformer.layers.{layer}.{name}" for layer in range(2) for name in LINEAR]
    expected = set(plain) | {f"{name}.weights_scaling_factor" for name in (*matrices, *TABLES)}
    expected |= {f"{name}.weights_offset" for name in matrices if kind == "int4"}
    assert set(tensors) == expected
    for name in (*matrices, *TABLES):
        rows, columns = plain[f"{name}.weight"].shape
        data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weights_scaling_factor"]
        if kind == "int4" and name not in TABLES:
            assert (data.dtype, tuple(data.shape)) == (torch.uint8, (rows, columns // 2))
            assert (scale.dtype, tuple(scale.shape)) == (torch.float16, (rows, columns // 32))
        else:
            assert (data.dtype, tuple(data.shape)) == (torch.int8, (rows, columns))
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (rows,))
    others = set(plain) - {f"{name}.weight" for name in (*matrices, *TABLES)}
    assert all(torch.equal(tensors[name], plain[name]) for name in others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_stored_is_near_the_source(tmp_path: Path, kind: WeightOnly, family: Family) -> None:
    """Rounding by calibration moves numbers by more than half a step, but not by much more."""
    plain = load_file(build(tmp_path, None, family) / "target/rank0.safetensors")
    tensors = load_file(build(tmp_path, kind, family) / "draft/rank0.safetensors")
    for name in [key.removesuffix(".weight") for key in plain if plain[key].dim() == 2]:
        error = (numbers(tensors, name) - plain[f"{name}.weight"]).square().mean().sqrt() / plain[
            f"{name}.weight"
        ].std()
        assert error < (0.15 if kind == "int4" and name not in TABLES else 0.02), name


@pytest.mark.parametrize("tied", [False, True])
def test_the_target_is_not_touched(tmp_path: Path, tied: bool) -> None:
    plain, engine = build(tmp_path, None, tied=tied), build(tmp_path, "int4", tied=tied)
    ours, theirs = (load_engine(pair / "target").files["rank0.safetensors"] for pair in (engine, plain))
    assert ours == theirs
    assert not (plain / "draft").exists()
    tensors = load_file(engine / "draft/rank0.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.vocab_embedding.weight"]) == tied


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_runner_computes_with_what_is_stored(tmp_path: Path, kind: WeightOnly, family: Family) -> None:
    """Against the same model with its numbers written out as a plain checkpoint."""
    engine = build(tmp_path, kind, family)
    draft, target = engine / "draft", engine / "target"
    tensors = load_file(draft / "rank0.safetensors")
    matrices = [key.removesuffix(".weight") for key in tensors if tensors[key].dtype in (torch.int8, torch.uint8)]
    written_out = TorchRunner(target, num_blocks=4, block_size=16, dtype=torch.float64)
    runner = TorchRunner(draft, num_blocks=4, block_size=16, dtype=torch.float64)
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    for name in matrices:
        del weights[f"{name}.weights_scaling_factor"]
        weights.pop(f"{name}.weights_offset", None)
        data, scale = tensors[f"{name}.weight"], tensors[f"{name}.weights_scaling_factor"]
        offset = tensors.get(f"{name}.weights_offset", scale)
        weights[f"{name}.weight"] = (
            from_int8(data, scale, torch.float64)
            if data.dtype == torch.int8
            else from_int4(data, scale, offset, torch.float64)
        )
    config = ModelConfig.from_checkpoint(json.loads((target / "config.json").read_text()))
    written_out.model = TorchModel(config, weights)
    prompt = list(range(5, 55))
    inputs = pack([SequenceInput(prompt, range(50), 0, range(4), range(50), num_logits=50)])
    assert torch.allclose(runner.forward(inputs), written_out.forward(inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_says_what_was_done(tmp_path: Path, kind: WeightOnly) -> None:
    engine = build(tmp_path, kind)
    draft, target = load_engine(engine / "draft"), load_engine(engine / "target")
    assert (draft.quant_algo, draft.calibration) == ("W8A16" if kind == "int8" else "W4A16", calibrate.DEFAULT_TEXT)
    assert (target.quant_algo, target.calibration) == (None, None)
    quantization = json.loads((engine / "draft/config.json").read_text())["quantization"]
    assert quantization == {"quant_algo": draft.quant_algo, "kv_cache_quant_algo": None}
    assert {path.name for path in engine.iterdir()} == {"target", "draft", "pair.json"}
    check_hashes(engine / "draft")


def test_a_separate_draft_may_be_int4_too(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source", intermediate_size=64)
    config = tiny_config(draft={"kind": "model", "window_size": 64}, quantization={"draft": "int4"})
    engine = build_pair(source, source, config, tmp_path / "engine")
    assert load_engine(engine / "draft").quant_algo == "W4A16"


def test_rows_that_are_no_whole_groups_are_refused_in_int4_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int4': the intermediate size 48 of .*no multiple of 32.*use int8"):
        build(tmp_path, "int4", intermediate_size=48)
    build(tmp_path, "int8", intermediate_size=48)


def test_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source", intermediate_size=64)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1e38
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"source: the model computes NaN or infinity on the calibration text"):
        build_pair(source, "self", tiny_config(quantization={"draft": "int4"}), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_the_sums_for_disk_and_gpu_count_small_weights_and_no_cache() -> None:
    spec = PUBLISHED["meta-llama/Llama-3.1-8B-Instruct"].spec
    plain = rank_bytes(spec, 0, 1, Storage("bfloat16"))
    tables = 2 * spec.vocab_size * spec.hidden_size
    int8 = rank_bytes(spec, 0, 1, Storage("bfloat16", weight_only="int8"))
    int4 = rank_bytes(spec, 0, 1, Storage("bfloat16", weight_only="int4"))
    assert int8 == pytest.approx(plain / 2, rel=0.01)
    assert int4 == pytest.approx(tables + (plain / 2 - tables) * 5 / 8, rel=0.01)
    config = PairConfig.model_validate(
        {"name": "a", "target": "b", "draft": {"kind": "self"}, "quantization": {"draft": "int4"}}
    )
    need = memory_need(config, spec, spec)
    assert (need.draft_kv, need.weights) == (0, plain + int4)
