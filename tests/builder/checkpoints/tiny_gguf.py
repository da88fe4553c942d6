"""Writing a tiny Hugging Face checkpoint as a GGUF, the way llama.cpp's converter lays it out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONTROL, _NORMAL, _UNUSED = 3, 1, 5


def write_tiny_gguf(
    checkpoint: Path,
    path: Path,
    *,
    quantise: str | None = None,
    rope_factors: npt.NDArray[np.float32] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Convert. quantise: GGML type of the matrices (None: float32). metadata, extra: further keys and tensors."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    _write_metadata(writer, config)
    _write_tokenizer(writer, checkpoint, config["vocab_size"])
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = permute(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        _add(writer, _gguf_name(name), tensor, quantise)
    if rope_factors is not None:
        _add(writer, "rope_freqs.weight", rope_factors, None)
    for name, tensor in (extra or {}).items():
        _add(writer, name, tensor, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of q and k rows (LlamaModel.permute in convert_hf_to_gguf.py)."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    result: npt.NDArray[np.float32] = halves.swapaxes(1, 2).reshape(weights.shape)
    return result


def _write_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if config["rope_parameters"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])


def _write_tokenizer(writer: Any, checkpoint: Path, rows: int) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    types = [_CONTROL if token in special else _NORMAL for token in tokens]
    padding = rows - len(tokens)
    writer.add_token_list([*tokens, *(f"[PAD{len(tokens) + index}]" for index in range(padding))])
    writer.add_token_types([*types, *[_UNUSED] * padding])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add(writer: Any, name: str, tensor: npt.NDArray[np.float32], quantise: str | None) -> None:
    if quantise is None or tensor.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
        return
    kind = gguf.GGMLQuantizationType[quantise]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in fixed:
        return f"{fixed[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[rest]}.{kind}"
