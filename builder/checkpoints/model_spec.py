"""What a checkpoint's configuration says about the model, and the refusal of everything that is not supported."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from magicdec.errors import CheckpointError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
_SUPPORTED = "Supported: LLaMA 2, 3, 3.1, 3.2 and models of that form, Mistral, Qwen2, Qwen2.5, Qwen3 (dense)."
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# What transformers assumes where a config.json leaves the key out.
_MISTRAL_KV_HEADS, _MISTRAL_WINDOW, _QWEN3_HEAD_DIM = 8, 4096, 128


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of one of the supported families; sizes are numbers of elements.

    rotary_scaling: None, or {"type", "rope_type": "linear" | "llama3", "factor", ...}. eos_token_ids: as far as the
    configuration names them. tied: lm_head is the embedding.
    """

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    tied: bool
    eos_token_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        """TensorRT-LLM's name; Mistral without a sliding window is a LLaMA there, Qwen3 a kind of Qwen2."""
        return "Qwen2ForCausalLM" if self.family in ("qwen2", "qwen3") else "LlamaForCausalLM"

    @property
    def has_qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        attention = qkv * self.hidden_size + self.hidden_size * self.num_heads * self.head_size
        extras = (qkv if self.has_qkv_bias else 0) + (2 * self.head_size if self.has_qk_norm else 0)
        layer = attention + extras + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def to_trtllm(
        self, dtype: str, tp_size: int, *, quant_algo: str | None = None, fp8_kv: bool = False
    ) -> dict[str, Any]:
        """config.json of a TensorRT-LLM checkpoint."""
        return {
            "architecture": self.architecture,
            "dtype": dtype,
            "logits_dtype": "float32",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "norm_epsilon": self.norm_epsilon,
            "position_embedding_type": "rope_gpt_neox",
            "max_position_embeddings": self.max_position_embeddings,
            "rotary_base": self.rotary_base,
            "rotary_scaling": self.rotary_scaling,
            "attn_bias": self.has_qkv_bias or quant_algo == "FP8",  # biases make up for what is subtracted from inputs
            "mlp_bias": quant_algo == "FP8",
            "qk_layernorm": self.has_qk_norm,
            "tie_word_embeddings": self.tied,
            **({"qwen_type": self.family} if self.architecture == "Qwen2ForCausalLM" else {}),
            "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
            "quantization": {
                "quant_algo": quant_algo,
                "kv_cache_quant_algo": "FP8" if fp8_kv else None,
            },
        }


class _Config:
    """A configuration with errors that name the file, the key and the value."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def refusal(self, key: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {value!r}: {why}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing, so this is no complete model configuration.")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refusal(key, value, "a positive whole number is needed.")
        return value

    def number(self, key: str, default: float, values: dict[str, Any] | None = None) -> float:
        value = (self.values if values is None else values).get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refusal(key, value, "a positive number is needed.")
        return float(value)


def parse_config(values: dict[str, Any], where: str, *, has_lm_head: bool) -> ModelSpec:
    """Read a Hugging Face config.json, as transformers 4 or 5 writes it.

    where: how errors name the file. has_lm_head: whether the checkpoint holds an output matrix of its own; it decides
    about tied embeddings where the configuration does not. CheckpointError for anything that is not supported.
    """
    config = _Config(values, where)
    family = _family(config)
    _refuse_variants(config)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    kv_heads = config.size("num_key_value_heads", _MISTRAL_KV_HEADS if family == "mistral" else heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads {heads}.")
    head_size = config.size("head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads)
    if head_size % 2:
        raise config.refusal("head_dim", head_size, "rotary embedding needs an even number.")
    max_len = config.size("max_position_embeddings")
    _refuse_sliding_window(config, family, max_len)
    base, scaling = _rope(config)
    return ModelSpec(
        family=family,
        hidden_size=hidden,
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_len,
        rotary_base=base,
        rotary_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings", not has_lm_head)),
        eos_token_ids=_token_ids(config, "eos_token_id"),
    )


def _family(config: _Config) -> Family:
    model_type, classes = config.get("model_type"), config.get("architectures", [])
    name = classes[0] if isinstance(classes, list) and classes else model_type
    if model_type not in _CLASSES or name not in (model_type, _CLASSES[model_type]):
        raise config.refusal("architecture", name, f"this architecture is not supported. {_SUPPORTED}")
    return cast(Family, model_type)


def _refuse_variants(config: _Config) -> None:
    """Keys that change what the model computes and that nothing here executes."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.refusal("hidden_act", activation, "only 'silu' is supported.")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise config.refusal(key, True, "biases are supported in Qwen2's q, k and v only.")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key, 0):
            raise config.refusal(key, config.get(key), f"mixtures of experts are not supported. {_SUPPORTED}")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        why = "quantised checkpoints are not supported; give the bfloat16 or float16 original."
        raise config.refusal("quantization_config.quant_method", method, why)


def _refuse_sliding_window(config: _Config, family: Family, max_len: int) -> None:
    if family == "mistral":
        window = config.values.get("sliding_window", _MISTRAL_WINDOW)
    else:
        window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    if window is not None and window < max_len:
        why = "models that were trained with sliding-window attention are not supported"
        raise config.refusal("sliding_window", window, f"{why}; use one without (Mistral: version 0.2 or later).")
    for kind in config.get("layer_types", []):
        if kind != "full_attention" and not (kind == "sliding_attention" and window is not None):
            raise config.refusal("layer_types", kind, "only 'full_attention' is supported.")


def _rope(config: _Config) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key, {})
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            raise config.refusal(key, value, "one set of RoPE parameters for all layers is needed.")
        rope |= value
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = config.number("rope_theta", config.number("rope_theta", 10000.0), rope)
    partial = config.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0), rope)
    if partial != 1.0:
        raise config.refusal("partial_rotary_factor", partial, "only full rotary embedding (1.0) is supported.")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, {"type": kind, "rope_type": kind, "factor": _rope_value(config, rope, "factor")}
    if kind == "llama3":
        scaling: dict[str, Any] = {key: _rope_value(config, rope, key) for key in _LLAMA3_KEYS}
        scaling[_LLAMA3_KEYS[-1]] = int(scaling[_LLAMA3_KEYS[-1]])
        return base, {"type": kind, "rope_type": kind, **scaling}
    raise config.refusal("rope_scaling type", kind, "RoPE scaling types 'linear' and 'llama3' are supported, or none.")


def _rope_value(config: _Config, rope: dict[str, Any], key: str) -> float:
    if rope.get(key) is None:
        raise CheckpointError(f"{config.where}: rope_scaling has no {key}, which its type needs.")
    return config.number(key, 0.0, rope)


def _token_ids(config: _Config, key: str) -> tuple[int, ...]:
    value = config.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise config.refusal(key, value, "a token id or a list of them is needed.")
    return tuple(ids)
