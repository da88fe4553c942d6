"""Tiny random checkpoints in Hugging Face's layout, with a real tokenizer.json: input for tests that need a model.

Nothing here imports transformers, so a checkpoint costs milliseconds. Weights are scaled so that the logits differ
between tokens by a few units and attention is not uniform.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Family = Literal["llama", "llama3", "llama-linear", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "llama3", "llama-linear", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
MERGES = ("t h", "h e", "i n", "e r", "a n", "Ġ t", "Ġ a", "Ġ s", "o n", "r e", "Ġt he", "e n", "o r", "in g", "a t")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_SCALING: dict[str, dict[str, Any]] = {
    # Short original length: with 8-dimensional heads one frequency stays, one is smoothed, two are divided.
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "llama-linear": {"rope_type": "linear", "factor": 4.0},
}


def write_tiny_checkpoint(
    directory: Path,
    family: Family = "llama",
    *,
    tied: bool = False,
    vocab_size: int = 128,
    tokenizer_vocab_size: int | None = None,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 48,
    max_position_embeddings: int = 8192,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    config_style: Literal["v4", "v5"] = "v5",
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json, weights and tokenizer into `directory` (made if absent); returns it.

    head_dim: None = hidden_size / num_heads, for qwen3 twice that. vocab_size: rows of the model;
    tokenizer_vocab_size: ids of the tokenizer (default the same). shards: number of safetensors files.
    config_style: rope_scaling and rope_theta as transformers 4 wrote them, or version 5's rope_parameters.
    overrides: further keys of config.json, written last; None removes a key.
    """
    if head_dim is None:
        head_dim = hidden_size // num_heads * (2 if family == "qwen3" else 1)
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family.split("-")[0].replace("llama3", "llama")]],
        "model_type": family.split("-")[0].replace("llama3", "llama"),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": str(dtype).removeprefix("torch."),
        **_rope(family, config_style),
        **({"sliding_window": None} if family == "mistral" else {}),
        **overrides,
    }
    config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID], "bos_token_id": BOS_ID}))
    tensors = tiny_weights(config, seed=seed)
    _save({name: tensor.to(dtype) for name, tensor in tensors.items()}, directory, shards)
    write_tiny_tokenizer(directory, tokenizer_vocab_size or vocab_size)
    return directory


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights, by Hugging Face's names, for a config as `write_tiny_checkpoint` makes it."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * float(gain * columns**-0.5)

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden, 2.0)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = norm(hidden)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = linear(rows, hidden)
            if config["model_type"] == "qwen2":
                tensors[f"{layer}self_attn.{name}_proj.bias"] = 0.5 * torch.randn(rows, generator=generator)
        if config["model_type"] == "qwen3":
            tensors[layer + "self_attn.q_norm.weight"] = norm(head_dim)
            tensors[layer + "self_attn.k_norm.weight"] = norm(head_dim)
        tensors[layer + "self_attn.o_proj.weight"] = linear(hidden, q_size)
        tensors[layer + "post_attention_layernorm.weight"] = norm(hidden)
        tensors[layer + "mlp.gate_proj.weight"] = linear(inner, hidden)
        tensors[layer + "mlp.up_proj.weight"] = linear(inner, hidden)
        tensors[layer + "mlp.down_proj.weight"] = linear(hidden, inner)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden, 2.0)
    return tensors


def write_tiny_tokenizer(directory: Path, vocab_size: int = 128) -> None:
    """A byte-level BPE tokenizer: 5 special tokens, the 96 bytes of plain text, 15 English merges, then other bytes.

    From 276 ids on it covers every byte, so any text survives encoding and decoding; below, the bytes that have no
    token become <unk>. Ids beyond 276 are filled with <extra_N>.
    """
    common, rest = _byte_pieces()
    merges = [merge.split() for merge in MERGES] if vocab_size >= len(SPECIAL_TOKENS) + len(common) else []
    merges = merges[: max(vocab_size - len(SPECIAL_TOKENS) - len(common), 0)]
    tokens = [*SPECIAL_TOKENS, *common, *("".join(merge) for merge in merges), *rest]
    tokens += [f"<extra_{index}>" for index in range(len(tokens), vocab_size)]
    vocab = {token: index for index, token in enumerate(tokens[:vocab_size])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": merges},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _rope(family: Family, style: str) -> dict[str, Any]:
    scaling = _ROPE_SCALING.get(family)
    if style == "v4":
        return {"rope_theta": 10000.0, **({"rope_scaling": scaling} if scaling else {})}
    return {"rope_parameters": {"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})}}


def _save(tensors: dict[str, torch.Tensor], directory: Path, shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _byte_pieces() -> tuple[list[str], list[str]]:
    """All 256 bytes as byte-level BPE spells them (printable ones as they are, others from U+0100 on).

    First the 96 of plain English text, most frequent first, then the others.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    common = [ord(char) for char in " etaoinshrdlcumwfgypbvkxjqz.,\n'\"-?!:;()0123456789"]
    common += [byte for byte in range(0x20, 0x7F) if byte not in common]
    return [spelling[byte] for byte in common], [spelling[byte] for byte in range(256) if byte not in common]
