"""A GGUF file as a source of tensors: metadata to configuration, dequantised rows, llama.cpp's q/k order undone."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from magicdec.builder.checkpoints.model_spec import ModelSpec, parse_config
from magicdec.builder.checkpoints.shapes import check_shapes
from magicdec.errors import CheckpointError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "rope.freq_base": "rope_theta",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_UNUSED = 5
_ROPE_FREQS = "rope_freqs.weight"
# Meta's constants for every LLaMA 3.1 and 3.2; llama.cpp's converter stores only the divisors that come out of them.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class GgufSource:
    """A GGUF file by Hugging Face's names and in Hugging Face's row order; see `TensorSource`.

    Quantised rows are dequantised (float32) as they are read. Where the architecture is `llama`, llama.cpp has
    interleaved the halves of each q and k head for its kind of rotary embedding; `read` puts the rows back.
    tokenizer_model, tokenizer_rule: tokenizer.ggml.model ("gpt2", "llama") and .pre (how text is split into words);
    num_tokens: its tokens, without those that only pad the vocabulary to the model's rows.
    """

    format: Literal["safetensors", "gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        freqs = self._tensors.pop(_ROPE_FREQS, None)
        config = _config(reader.fields, path)
        config["vocab_size"] = int(self._tensor("model.embed_tokens.weight").shape[-1])
        if freqs is not None:
            factors = np.asarray(freqs.data, dtype=np.float64)
            config["rope_scaling"] = _llama3_scaling(factors, config.get("rope_theta", 10000.0), path)
        self.spec: ModelSpec = parse_config(config, str(path), has_lm_head="lm_head.weight" in self._tensors)
        found = {name: tuple(int(size) for size in reversed(t.shape)) for name, t in self._tensors.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = check_shapes(self.spec, found, path)
        self._interleaved = config["model_type"] == "llama"
        self.tokenizer_model, self.tokenizer_rule = (
            reader.fields[key].contents() if key in reader.fields else "default"
            for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
        )
        self.num_tokens = _num_tokens(reader.fields)

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        from gguf.quants import dequantize

        tensor = self._tensor(name)
        if tensor.data.ndim == 1:
            data = dequantize(tensor.data, tensor.tensor_type)[slice(*rows)]
        else:
            index: Any = slice(*rows)
            if self._interleaved and name.endswith((".q_proj.weight", ".k_proj.weight")):
                index = _interleaved_rows(np.arange(*rows), self.spec.head_size)
            try:
                data = dequantize(tensor.data[index], tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise CheckpointError(
                    f"{self.path}: tensor {name} is quantised as {kind}, which the gguf package cannot dequantise; "
                    "give another quantisation, such as Q8_0 or F16."
                ) from None
            if columns is not None:
                data = data[:, slice(*columns)]
        return torch.from_numpy(np.array(data, dtype=np.float32))

    def close(self) -> None:
        self._tensors.clear()

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing, the file is incomplete. Copy it again.")
        return self._tensors[name]


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise CheckpointError(f"{path}: reading GGUF needs the package gguf: pip install 'magicdec[gguf]'") from None
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader walks a memory map and fails in many ways on a damaged file
        size = path.stat().st_size
        raise CheckpointError(f"{path}: truncated or no GGUF file ({size} bytes; {error}). Copy it again.") from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path}: a big-endian GGUF file is not supported; convert it with llama.cpp.")
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise CheckpointError(f"{path} is one part of a split GGUF; join the parts with llama-gguf-split --merge.")
    return reader


def _config(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """The metadata as a Hugging Face configuration, so that one parser decides what is supported."""

    def value(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    name = value("general.architecture")
    config: dict[str, Any] = {"model_type": name, "architectures": [_ARCHITECTURES.get(name, name)]}
    config |= {hf: value(f"{name}.{key}") for key, hf in _SIZES.items()}
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(config[key], list):
            raise CheckpointError(f"{path}: {key} differs between layers, which is not supported.")
    config["use_sliding_window"] = config["sliding_window"] is not None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config["head_dim"] is None and heads and hidden:
        config["head_dim"] = hidden // heads
    rotary = value(f"{name}.rope.dimension_count")
    if rotary is not None and config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    config["rope_scaling"] = _rope_scaling(value(f"{name}.rope.scaling.type"), value(f"{name}.rope.scaling.factor"))
    ids = [value(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    config["eos_token_id"] = sorted({token for token in ids if token is not None})
    return config


def _num_tokens(fields: dict[str, Any]) -> int:
    """1 + the highest token id that is not marked as unused, as llama.cpp marks padding ([PAD151665])."""
    if "tokenizer.ggml.tokens" not in fields:
        return 0
    size = len(fields["tokenizer.ggml.tokens"].data)
    types = fields["tokenizer.ggml.token_type"].contents() if "tokenizer.ggml.token_type" in fields else []
    while 0 < size <= len(types) and types[size - 1] == _UNUSED:
        size -= 1
    return size


def _rope_scaling(kind: str | None, factor: float | None) -> dict[str, Any] | None:
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": factor}


def _llama3_scaling(factors: npt.NDArray[np.float64], base: float, path: Path) -> dict[str, Any]:
    """LLaMA 3.1's scaling, from the divisor of each frequency that llama.cpp keeps in rope_freqs.weight [head / 2].

    Only the divisors are stored, so the parameters are the known constants with the largest divisor as the factor,
    and the divisors that follow from them must be those in the file.
    """
    size = factors.shape[0]
    factor = float(factors.max())
    wavelengths = 2 * math.pi * base ** (np.arange(size) / size)
    smooth = (_LLAMA3_ORIGINAL / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = smooth.clip(0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise CheckpointError(
            f"{path}: rope_freqs.weight is {np.round(factors, 3).tolist()}, which is not LLaMA 3.1's RoPE scaling; no "
            "other is supported in a GGUF file. Give the Hugging Face checkpoint."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _interleaved_rows(rows: npt.NDArray[np.int64], head_size: int) -> npt.NDArray[np.int64]:
    """Where llama.cpp keeps these rows: element d of half s of a head stands at 2 d + s instead of s head/2 + d."""
    head, within = rows // head_size, rows % head_size
    half, element = within // (head_size // 2), within % (head_size // 2)
    index: npt.NDArray[np.int64] = head * head_size + 2 * element + half
    return index


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; one without a counterpart keeps its own and is refused by name later."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name
