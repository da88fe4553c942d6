"""The rank files: layout, tensor parallel shards, dtypes, and memory that does not grow with the model."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicdec.builder import convert
from magicdec.builder.checkpoints.source import SafetensorsSource, open_source
from magicdec.builder.convert import write_rank
from magicdec.builder.shard import check_tp, plan_rank
from magicdec.builder.storage import Storage
from magicdec.errors import CheckpointError, ConfigError
from magicdec.pair.config import DtypeName
from magicdec.pair.manifest import hash_file, load_engine
from magicdec.plugins.dtypes import TORCH_DTYPES
from tests.builder.engines import build_target, rejoin
from tests.builder.published import PUBLISHED
from tests.support.tiny_models import FAMILIES, Family, write_tiny_checkpoint

STORED = [(name, TORCH_DTYPES[name]) for name in ("bfloat16", "float16", "float32")]


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def test_names_and_fused_tensors_of_one_rank(tmp_path: Path) -> None:
    theirs = load_file(write_tiny_checkpoint(tmp_path / "hf", "qwen2") / "model.safetensors")
    ours = load_file(build_target(tmp_path / "hf", tmp_path / "engine") / "rank0.safetensors")
    layer, hf = "transformer.layers.1.", "model.layers.1."
    expected = {
        "transformer.vocab_embedding.weight": theirs["model.embed_tokens.weight"],
        "transformer.ln_f.weight": theirs["model.norm.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
        layer + "input_layernorm.weight": theirs[hf + "input_layernorm.weight"],
        layer + "post_layernorm.weight": theirs[hf + "post_attention_layernorm.weight"],
        layer + "attention.dense.weight": theirs[hf + "self_attn.o_proj.weight"],
        layer + "mlp.fc.weight": theirs[hf + "mlp.gate_proj.weight"],
        layer + "mlp.gate.weight": theirs[hf + "mlp.up_proj.weight"],
        layer + "mlp.proj.weight": theirs[hf + "mlp.down_proj.weight"],
        **{
            f"{layer}attention.qkv.{kind}": torch.cat([theirs[f"{hf}self_attn.{n}_proj.{kind}"] for n in "qkv"])
            for kind in ("weight", "bias")
        },
    }
    assert {name for name in ours if not name.startswith("transformer.layers.0.")} == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_joined_again_are_the_single_rank(tmp_path: Path, family: Family, tp_size: int) -> None:
    # 130 rows of lm_head are padded to 132 for 4 ranks; 2 KV heads are duplicated on 4 ranks.
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family, vocab_size=130, tied=family == "qwen3")
    whole = load_file(build_target(checkpoint, tmp_path / "one") / "rank0.safetensors")
    shards = build_target(checkpoint, tmp_path / "many", tp_size=tp_size)
    joined = rejoin(shards, read_config(shards))
    assert set(joined) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(joined[name], tensor), name


def test_each_rank_holds_its_own_heads(tmp_path: Path) -> None:
    theirs = load_file(write_tiny_checkpoint(tmp_path / "hf", num_kv_heads=4) / "model.safetensors")
    shards = build_target(tmp_path / "hf", tmp_path / "engine", tp_size=2)
    second = load_file(shards / "rank1.safetensors")["transformer.layers.0.attention.qkv.weight"]
    parts = [theirs[f"model.layers.0.self_attn.{name}_proj.weight"][16:] for name in "qkv"]
    assert torch.equal(second, torch.cat(parts))


def test_lm_head_is_written_when_tied_and_padded_to_the_ranks(tmp_path: Path) -> None:
    theirs = load_file(write_tiny_checkpoint(tmp_path / "hf", tied=True, vocab_size=129) / "model.safetensors")
    shards = build_target(tmp_path / "hf", tmp_path / "engine", tp_size=2)
    assert read_config(shards)["vocab_size"] == 129
    second = load_file(shards / "rank1.safetensors")["lm_head.weight"]
    assert second.shape == (65, 32)
    assert torch.equal(second[:64], theirs["model.embed_tokens.weight"][65:])
    assert not second[64].any()


@pytest.mark.parametrize(("dtype", "torch_dtype"), STORED)
def test_weights_are_cast(tmp_path: Path, dtype: str, torch_dtype: torch.dtype) -> None:
    theirs = load_file(write_tiny_checkpoint(tmp_path / "hf") / "model.safetensors")
    target = build_target(tmp_path / "hf", tmp_path / "engine", dtype=dtype)
    ours = load_file(target / "rank0.safetensors")
    assert {tensor.dtype for tensor in ours.values()} == {torch_dtype}
    assert torch.equal(
        ours["transformer.layers.0.mlp.fc.weight"], theirs["model.layers.0.mlp.gate_proj.weight"].to(torch_dtype)
    )
    assert (read_config(target)["dtype"], load_engine(target).dtype) == (dtype, dtype)


def test_records_are_those_of_the_files(tmp_path: Path) -> None:
    target = build_target(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "engine", tp_size=2)
    records = load_engine(target).files
    assert {path.name for path in target.iterdir()} == {*records, "engine.json"}
    for name, record in records.items():
        assert (record.bytes, record.sha256) == ((target / name).stat().st_size, hash_file(target / name))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (70000.0, "float16", r"its largest weight 70000 is out of torch\.float16's range; use --dtype bfloat16"),
        (float("nan"), "float32", "it holds NaN or infinity, so the checkpoint is damaged"),
        (float("inf"), "bfloat16", "it holds NaN or infinity"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, value: float, dtype: DtypeName, message: str) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight: {message}"):
        write_rank(open_source(directory), tmp_path / "rank0", rank=0, tp_size=1, storage=Storage(dtype))


@pytest.mark.parametrize(
    ("model", "tp_size", "message"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 2, r"tp_size 2: the target's 9 attention heads.*allows 1, 3"),
        ("Qwen/Qwen2.5-7B-Instruct", 8, r"28 attention heads.*allows 1, 2, 4"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 9, r"intermediate size 1536"),
        ("JackFram/llama-68m", 8, r"12 attention heads"),
    ],
)
def test_ranks_must_divide_the_model(model: str, tp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tp(PUBLISHED[model].spec, tp_size, "target")


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    spec = replace(PUBLISHED["JackFram/llama-68m"].spec, num_kv_heads=3)
    check_tp(spec, 3, "target")
    check_tp(spec, 6, "target")  # each KV head on two ranks
    with pytest.raises(ConfigError, match="3 KV heads"):
        check_tp(spec, 2, "target")


class CountingSource(SafetensorsSource):
    """Counts the bytes of the tensors it has handed out that are still alive."""

    live = peak = total = 0

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        tensor = super().read(name, rows, columns).clone()
        size = tensor.nbytes
        self.live, self.total = self.live + size, self.total + size
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._forget, size)
        return tensor

    def _forget(self, size: int) -> None:
        self.live -= size


def test_memory_is_a_chunk_and_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 4096
    monkeypatch.setattr(convert, "CHUNK_ELEMENTS", chunk // 4)
    directory = write_tiny_checkpoint(tmp_path, hidden_size=64, vocab_size=512, num_layers=4, intermediate_size=128)
    source = CountingSource(directory)
    write_rank(source, tmp_path / "rank0", rank=0, tp_size=1, storage=Storage("float32"))
    assert source.total > 100 * chunk
    assert source.peak <= 2 * chunk  # one being written and the next being read
    assert torch.equal(
        load_file(tmp_path / "rank0")["lm_head.weight"], load_file(directory / "model.safetensors")["lm_head.weight"]
    )


def anonymous_memory() -> int:
    """Bytes of this process that are not backed by a file (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("/proc/self/status has no RssAnon")


def test_process_memory_stays_near_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "CHUNK_ELEMENTS", 1 << 18)  # 1 MiB of float32
    directory = write_tiny_checkpoint(tmp_path, hidden_size=512, vocab_size=16384, num_layers=2, intermediate_size=2048)
    source, before, most = open_source(directory), anonymous_memory(), 0

    def on_bytes(_size: int) -> None:
        nonlocal most
        most = max(most, anonymous_memory() - before)

    write_rank(source, tmp_path / "rank0", rank=0, tp_size=1, storage=Storage("bfloat16"), on_bytes=on_bytes)
    assert (tmp_path / "rank0").stat().st_size > 40 << 20
    assert most < 12 << 20, f"{most / (1 << 20):.1f} MiB held while converting"


def test_every_element_of_a_rank_is_planned_once() -> None:
    for published in PUBLISHED.values():
        spec = published.spec
        for output in plan_rank(spec, 0, 1):
            rows = sum(piece.rows[1] - piece.rows[0] for piece in output.pieces)
            assert rows == output.shape[0], output.name
