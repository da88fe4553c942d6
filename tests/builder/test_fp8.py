"""FP8 checkpoints: what TensorRT-LLM expects to load, scales from calibration, and logits near the unquantised."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from magicdec.builder import calibrate
from magicdec.builder.build import build_pair
from magicdec.builder.observers import fp8_scale
from magicdec.builder.rounding import InputStatistics, round_to_fp8
from magicdec.errors import ConfigError
from magicdec.pair.manifest import load_engine
from magicdec.plugins import fp8 as fp8_numbers
from magicdec.plugins.cpu.library import native
from magicdec.plugins.fp8 import FP8, FP8_MAX, from_fp8, to_fp8
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.linear import Fp8Linear
from magicdec.plugins.model import kv_cache, native_model
from magicdec.plugins.model.native_model import NativeModel
from magicdec.plugins.model.torch_model import TorchModel
from magicdec.runtime.runners import torch_runner
from tests.builder.checkpoints.tiny_gguf import write_tiny_gguf
from tests.builder.engines import build_target, rejoin, tiny_config
from tests.builder.logits import reference_logits, runner_logits
from tests.support.tiny_models import FAMILIES, Family, write_tiny_checkpoint

BOTH: dict[str, Any] = {"quantization": {"target": "fp8"}, "kv_cache_dtype": "fp8"}
WEIGHTS: dict[str, Any] = {"quantization": {"target": "fp8"}}
CACHE: dict[str, Any] = {"kv_cache_dtype": "fp8"}
LINEAR = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
# Beside the weights of qwen2, whose qkv has a bias anyhow, and their widths in all.
OFFSETS = {
    "input_layernorm.offset": 32,
    "post_layernorm.offset": 32,
    "mlp.fc.bias": 48,
    "mlp.gate.bias": 48,
    "mlp.proj.bias": 32,
}
# Of random weights, whose logits are less well determined than a trained model's.
NEAR = 0.15
PROMPT = [(7 * index + index * index) % 120 + 5 for index in range(120)]


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has seen everything soon."""
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 1024)


def build_fp8(checkpoint: Path, output: Path, formats: dict[str, Any], **options: Any) -> Path:
    return build_pair(checkpoint, "self", tiny_config(**formats), output, **options) / "target"


@pytest.mark.parametrize("formats", [BOTH, WEIGHTS, CACHE], ids=["both", "weights", "cache"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_names_shapes_and_dtypes_are_those_that_tensorrt_llm_loads(
    tmp_path: Path, formats: dict[str, Any], tp_size: int
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "qwen2")
    plain_target = build_target(checkpoint, tmp_path / "plain", tp_size=tp_size, dtype="bfloat16")
    plain = load_file(plain_target / f"rank{tp_size - 1}.safetensors")
    target = build_fp8(checkpoint, tmp_path / "fp8", formats, tp_size=tp_size, dtype="bfloat16")
    tensors = load_file(target / f"rank{tp_size - 1}.safetensors")
    weights, cache = "quantization" in formats, "kv_cache_dtype" in formats
    scales = {
        f"transformer.layers.{layer}.{name}"
        for layer in range(2)
        for name in [
            *(f"{linear}.{kind}_scaling_factor" for linear in LINEAR for kind in ("weights", "activation") if weights),
            *(["attention.kv_cache_scaling_factor"] if cache else []),
        ]
    }
    offsets = {
        f"transformer.layers.{layer}.{name}": width for layer in range(2) for name, width in OFFSETS.items() if weights
    }
    assert set(tensors) == set(plain) | scales | set(offsets)
    for name, tensor in tensors.items():
        if name in scales:
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (1,)), name
            assert tensor.item() > 0
        elif name in offsets:
            assert (tensor.dtype, tensor.ndim) == (torch.bfloat16, 1), name
            assert len(tensor) == offsets[name] // (tp_size if name.endswith(("fc.bias", "gate.bias")) else 1), name
        else:
            changed = weights and name.endswith("attention.qkv.bias")  # it makes up for what inputs are short of
            quantised = weights and name.endswith(tuple(f"{linear}.weight" for linear in LINEAR))
            assert tensor.dtype == (FP8 if quantised else torch.bfloat16), name
            assert tensor.shape == plain[name].shape, name
            assert quantised or changed or torch.equal(tensor, plain[name]), name
    config = json.loads((target / "config.json").read_text())
    expected = {"quant_algo": "FP8" if weights else None, "kv_cache_quant_algo": "FP8" if cache else None}
    assert config["quantization"] == expected
    manifest = load_engine(target)
    assert {"quant_algo": manifest.quant_algo, "kv_cache_quant_algo": manifest.kv_cache_quant_algo} == expected
    assert manifest.calibration == calibrate.DEFAULT_TEXT
    assert manifest.dtype == "bfloat16"


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_share_the_scales_and_joined_again_are_the_single_rank(tmp_path: Path, tp_size: int) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    whole = load_file(build_fp8(checkpoint, tmp_path / "one", BOTH) / "rank0.safetensors")
    shards = build_fp8(checkpoint, tmp_path / "many", BOTH, tp_size=tp_size)
    joined = rejoin(shards, json.loads((shards / "config.json").read_text()))
    assert set(joined) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), joined[name].view(torch.uint8)), name


def test_weights_are_near_the_originals_and_scales_are_their_largest_over_448(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "qwen3")
    plain = load_file(build_target(checkpoint, tmp_path / "plain") / "rank0.safetensors")
    tensors = load_file(build_fp8(checkpoint, tmp_path / "fp8", WEIGHTS) / "rank0.safetensors")
    for prefix in (f"transformer.layers.{layer}.{name}." for layer in range(2) for name in LINEAR):
        original, scale = plain[prefix + "weight"], tensors[prefix + "weights_scaling_factor"].item()
        stored = from_fp8(tensors[prefix + "weight"], torch.float32) * scale
        # Rounding alone would give at most 1/16; errors that are made up for in other columns add to theirs.
        assert ((stored - original).norm() / original.norm()) < 0.05, prefix
        largest = original.abs().max().item() / FP8_MAX
        assert scale == pytest.approx(largest, rel=1e-6) or prefix.endswith(("fc.", "gate."))
    for layer in range(2):
        fc, gate = (f"transformer.layers.{layer}.mlp.{name}." for name in ("fc", "gate"))
        both = max(plain[fc + "weight"].abs().max().item(), plain[gate + "weight"].abs().max().item())
        for name in (fc, gate):
            assert tensors[name + "weights_scaling_factor"].item() == pytest.approx(both / FP8_MAX, rel=1e-6)


def test_what_is_subtracted_from_inputs_stands_in_the_biases(tmp_path: Path) -> None:
    """Whatever the offsets, weights @ (input - offset) + bias is what the model without them computes."""
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", "qwen2")
    plain = load_file(build_target(checkpoint, tmp_path / "plain") / "rank0.safetensors")
    tensors = load_file(build_fp8(checkpoint, tmp_path / "fp8", WEIGHTS) / "rank0.safetensors")
    for layer in (f"transformer.layers.{index}." for index in range(2)):
        for norm, name in (("input", "attention.qkv"), ("post", "mlp.fc"), ("post", "mlp.gate")):
            offset = tensors[f"{layer}{norm}_layernorm.offset"]
            assert offset.abs().max() > 0, norm
            missing = plain[f"{layer}{name}.weight"] @ offset
            own = plain.get(f"{layer}{name}.bias", torch.zeros(()))
            torch.testing.assert_close(tensors[f"{layer}{name}.bias"], own + missing, rtol=1e-5, atol=1e-5)
        assert not tensors[layer + "mlp.proj.bias"].any()


def test_rounding_makes_up_for_errors_where_inputs_go_together() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 12, generator=generator) @ torch.randn(12, 150, generator=generator)
    x += 0.1 * torch.randn(2000, 150, generator=generator)
    weight = torch.randn(20, 150, generator=generator)
    scale = fp8_scale(weight.abs().max().item())
    rounded = round_to_fp8(weight, scale, InputStatistics(x.T @ x))
    nearest = to_fp8(weight, scale)

    def loss(stored: torch.Tensor) -> float:
        return float((x @ (from_fp8(stored, torch.float32) * scale - weight).T).square().mean())

    assert loss(rounded) < 0.2 * loss(nearest)


@pytest.mark.parametrize("moments", [torch.zeros(6, 6), torch.eye(6)], ids=["never used", "unrelated inputs"])
def test_without_anything_to_make_up_for_rounding_is_to_the_nearest(moments: torch.Tensor) -> None:
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    rounded = round_to_fp8(weight, 0.01, InputStatistics(moments))
    assert torch.equal(rounded.view(torch.uint8), to_fp8(weight, 0.01).view(torch.uint8))


def error(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """Root mean square difference over the spread of the reference."""
    return float((logits - reference).square().mean().sqrt() / reference.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_near_transformers(tmp_path: Path, family: Family) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family)
    reference = reference_logits(checkpoint, PROMPT)
    found = {
        name: error(reference, runner_logits(build_fp8(checkpoint, tmp_path / name, formats), PROMPT))
        for name, formats in (("weights", WEIGHTS), ("cache", CACHE), ("both", BOTH))
    }
    assert all(1e-3 < value < NEAR for value in found.values()), found


def test_a_gguf_source_is_calibrated_alike(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    from_gguf = build_fp8(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "a", BOTH)
    from_hf = build_fp8(checkpoint, tmp_path / "b", BOTH)
    assert error(reference_logits(checkpoint, PROMPT), runner_logits(from_gguf, PROMPT)) < NEAR
    ours, theirs = (load_file(path / "rank0.safetensors") for path in (from_gguf, from_hf))
    for name in (name for name in ours if name.endswith("_scaling_factor")):
        assert ours[name].item() == pytest.approx(theirs[name].item(), rel=0.2), name


def invert_weight_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Fp8Linear.__call__

    def inverted(self: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
        return call(dataclasses.replace(self, weight_scale=1 / self.weight_scale), x)

    monkeypatch.setattr(Fp8Linear, "__call__", inverted)


def forget_input_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Fp8Linear.__call__

    def forgetful(self: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
        return call(self, x) / self.input_scale

    monkeypatch.setattr(Fp8Linear, "__call__", forgetful)


def forget_kv_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache.KVCache, "scale", lambda *_: 1.0)


def forget_the_input_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = TorchModel._norm
    monkeypatch.setattr(TorchModel, "_norm", lambda self, x, weight, _offset=None: norm(self, x, weight))


def forget_to_turn_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hadamard, "queries", lambda _, queries: queries)


def do_not_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the text had been far too tame: what lies beyond the scale's range wraps to NaN."""

    def wrapping(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.where(x.abs() > 448 * scale / 4, torch.nan, x / scale).to(FP8)

    monkeypatch.setattr(kv_cache, "to_fp8", wrapping)


@pytest.mark.parametrize(
    "fault",
    [
        invert_weight_scale,
        forget_input_scale,
        forget_kv_scale,
        forget_the_input_offset,
        forget_to_turn_queries,
        do_not_saturate,
    ],
)
def test_planted_faults_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """They are planted in PyTorch's path, so that is what runs here."""
    monkeypatch.setattr(torch_runner, "native", lambda: None)
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    target = build_fp8(checkpoint, tmp_path / "engine", BOTH)
    reference = reference_logits(checkpoint, PROMPT)
    assert error(reference, runner_logits(target, PROMPT)) < NEAR
    fault(monkeypatch)
    assert not error(reference, runner_logits(target, PROMPT)) < NEAR


def leave_native_queries_unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unturned(Hadamard):
        def __init__(self, head_size: int, dtype: torch.dtype) -> None:
            super().__init__(head_size, dtype)
            self.to_queries = torch.eye(head_size, dtype=dtype)

    monkeypatch.setattr(native_model, "Hadamard", Unturned)


def leave_native_inputs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    add = NativeModel._add_layer
    monkeypatch.setattr(
        NativeModel,
        "_add_layer",
        lambda self, index, layer: add(self, index, dataclasses.replace(layer, input_offset=None, post_offset=None)),
    )


@pytest.mark.parametrize("fault", [leave_native_queries_unturned, leave_native_inputs_whole])
def test_faults_planted_in_the_native_path_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    if native() is None:
        pytest.skip("the native library was not built")
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    target = build_fp8(checkpoint, tmp_path / "engine", BOTH)
    reference = reference_logits(checkpoint, PROMPT)
    assert error(reference, runner_logits(target, PROMPT)) < NEAR
    fault(monkeypatch)
    assert not error(reference, runner_logits(target, PROMPT)) < NEAR


def test_calibration_reads_the_users_text(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    text = tmp_path / "text.txt"
    text.write_text("the rain in the other land " * 60)
    own = build_fp8(checkpoint, tmp_path / "own", BOTH, calibration_file=text)
    assert load_engine(own).calibration == str(text)
    default = build_fp8(checkpoint, tmp_path / "default", BOTH)
    key = "transformer.layers.1.mlp.proj.activation_scaling_factor"
    ours, theirs = (load_file(path / "rank0.safetensors")[key].item() for path in (own, default))
    assert 0 < ours < theirs  # far fewer different tokens, so nothing larger can have come up


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"too short", r"text\.txt has \d+ tokens, and calibration needs at least 256"), (b"\xff\xfe", "as UTF-8 text")],
)
def test_text_that_cannot_be_calibrated_on_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build_fp8(checkpoint, tmp_path / "engine", BOTH, calibration_file=tmp_path / "text.txt")
    assert not (tmp_path / "engine").exists()


def test_progress_counts_layers(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build_fp8(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "engine", BOTH, on_progress=lambda *a: seen.append(a))
    assert [entry for entry in seen if entry[0] == "calibrate target"] == [("calibrate target", n, 2) for n in range(3)]
    converted = [entry for entry in seen if entry[0] == "convert target"]
    assert converted[-1][1] == converted[-1][2]


def test_scale_of_nothing_is_one() -> None:
    assert fp8_scale(0.0) == 1.0
    assert to_fp8(torch.tensor([896.0]), fp8_scale(896.0)).item() == FP8_MAX
    assert torch.finfo(FP8).max == fp8_numbers.FP8_MAX
