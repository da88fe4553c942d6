"""GGUF files: the same engine as from the Hugging Face checkpoint, and refusals by name."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from magicdec.builder.checkpoints import gguf_source
from magicdec.builder.checkpoints.source import open_source
from magicdec.errors import CheckpointError
from magicdec.pair.manifest import load_engine
from tests.builder.checkpoints.tiny_gguf import permute, write_tiny_gguf
from tests.builder.engines import build_target
from tests.builder.published import PUBLISHED
from tests.support.tiny_models import Family, write_tiny_checkpoint


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one / "rank0.safetensors"), load_file(other / "rank0.safetensors")
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", ["llama", "llama-linear", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_engine_is_bitwise_that_of_the_checkpoint(tmp_path: Path, family: Family, tied: bool) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family, tied=tied)
    expected = build_target(checkpoint, tmp_path / "from-hf")
    target = build_target(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "from-gguf")
    assert same_tensors(expected, target)
    assert (load_engine(target).source_format, load_engine(target).eos_token_ids) == ("gguf", [2])
    ours, theirs = (open_source(path).spec for path in (tmp_path / "tiny.gguf", checkpoint))
    assert (ours.rotary_scaling, ours.rotary_base) == (theirs.rotary_scaling, theirs.rotary_base)
    assert ours.tied == tied


def test_a_missed_permutation_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    expected = build_target(checkpoint, tmp_path / "from-hf")
    monkeypatch.setattr(gguf_source, "_interleaved_rows", lambda rows, _head_size: rows)
    target = build_target(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "from-gguf")
    assert not same_tensors(expected, target)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_rows_and_columns(tmp_path: Path, kind: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", hidden_size=64, num_heads=4, intermediate_size=96)
    source = open_source(write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf", quantise=kind))
    original = load_file(checkpoint / "model.safetensors")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        code = gguf.GGMLQuantizationType[kind]
        heads = 2 if "k_proj" in name else 1
        stored = permute(original[name].numpy(), heads) if heads > 1 else original[name].numpy()
        kept = torch.from_numpy(np.array(gguf.dequantize(gguf.quants.quantize(stored, code), code)))
        if heads > 1:  # undo the order with the formula transformers uses
            kept = kept.reshape(heads, -1, 2, kept.shape[1]).swapaxes(2, 1).reshape(kept.shape)
        assert torch.equal(source.read(name, (3, 21), (5, 40)), kept[3:21, 5:40])
        assert (kept - original[name]).abs().max() < 0.1


@pytest.mark.parametrize("rule", ["gpt-2", "qwen2", "smollm"])
def test_tokenizer_is_the_same_and_padding_is_no_token(tmp_path: Path, rule: str) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", vocab_size=160, tokenizer_vocab_size=128)
    path = write_tiny_gguf(checkpoint, tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": rule})
    target = build_target(path, tmp_path / "engine")
    ours, theirs = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (target, checkpoint))
    assert ours.get_vocab() == theirs.get_vocab()
    assert load_engine(target).vocab_size == 128
    text = "the cat<s> is on the mat, x"
    assert ours.encode(text).ids == theirs.encode(text).ids
    loaded = PreTrainedTokenizerFast.from_pretrained(target)
    assert (loaded.bos_token_id, loaded.eos_token_id, len(loaded)) == (1, 2, 128)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["in", " 1984", " we", "'re"]),
        ("llama-bpe", ["in", " ", "198", "4", " we", "'re"]),
        ("qwen2", ["in", " ", "1", "9", "8", "4", " we", "'re"]),
        ("smollm", ["in", " ", "1", "9", "8", "4", " we", "'re"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, rule: str, words: list[str]) -> None:
    path = write_tiny_gguf(
        write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": rule}
    )
    tokenizer = Tokenizer.from_file(str(build_target(path, tmp_path / "engine") / "tokenizer.json"))
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("in 1984 we're")
    assert [piece.replace("Ġ", " ") for piece, _ in pieces] == words


def rope_factors(head_dim: int, base: float, factor: float, low: float = 1.0) -> Any:
    """Divisors as llama.cpp's converter writes them for LLaMA 3.1, frequency by frequency."""
    result = []
    for index in range(head_dim // 2):
        wavelength = 2 * np.pi * base ** (2 * index / head_dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / low:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4 - low)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, dtype=np.float32)


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"])
def test_llama3_scaling_is_told_from_its_divisors(model: str) -> None:
    spec = PUBLISHED[model].spec
    assert spec.rotary_scaling is not None
    factors = rope_factors(spec.head_size, spec.rotary_base, spec.rotary_scaling["factor"])
    found = gguf_source._llama3_scaling(factors.astype(np.float64), spec.rotary_base, Path("x.gguf"))
    assert found == {key: value for key, value in spec.rotary_scaling.items() if key != "type"}


def test_rope_freqs_tensor_is_read_or_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", head_dim=16)
    good = write_tiny_gguf(checkpoint, tmp_path / "good.gguf", rope_factors=rope_factors(16, 10000.0, 8.0))
    scaling = open_source(good).spec.rotary_scaling
    assert scaling is not None
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    bad = write_tiny_gguf(checkpoint, tmp_path / "bad.gguf", rope_factors=rope_factors(16, 10000.0, 8.0) + 0.5)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is \[1\.5, .*not LLaMA 3\.1's RoPE scaling"):
        open_source(bad)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
        ({"llama.rope.dimension_count": 4}, r"partial_rotary_factor is 0\.5"),
        ({"llama.expert_count": 8}, r"num_experts is 8: mixtures of experts"),
        ({"llama.attention.sliding_window": 256}, r"sliding_window is 256"),
        ({"split.count": 3}, "one part of a split GGUF.*--merge"),
        ({"tokenizer.ggml.pre": "my-own"}, r"tokenizer\.ggml\.pre is 'my-own'"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_tiny_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        build_target(path, tmp_path / "engine")


def test_other_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture is 'gemma2'"):
        open_source(tmp_path / "gemma.gguf")
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((2, 32), dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight \(of 1 such\) is not part of a llama"):
        open_source(write_tiny_gguf(checkpoint, tmp_path / "extra.gguf", extra=extra))


@pytest.mark.parametrize("keep", [0, 10, 300, 5000, -200])
def test_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_tiny_gguf(write_tiny_checkpoint(tmp_path / "hf"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: truncated or no GGUF file"):
        open_source(path)


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf")
    (tmp_path / "models").mkdir()
    path = write_tiny_gguf(checkpoint, tmp_path / "models" / "a.gguf")
    assert open_source(tmp_path / "models").path == path
    write_tiny_gguf(checkpoint, tmp_path / "models" / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_source(tmp_path / "models")
