"""Configurations of published models, as their makers published them, for checks that need no weights."""

from dataclasses import dataclass
from typing import Any

from magicdec.builder.checkpoints.model_spec import ModelSpec, parse_config

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Published:
    """config: the keys of config.json that matter; parameters: the number of parameters that is published."""

    config: dict[str, Any]
    parameters: int

    @property
    def spec(self) -> ModelSpec:
        has_lm_head = not self.config.get("tie_word_embeddings", False)
        return parse_config(self.config, "config.json", has_lm_head=has_lm_head)


def _model(model_type: str, sizes: tuple[int, ...], parameters: int, **more: Any) -> Published:
    names = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
    ]
    config = {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}
    return Published(config, parameters)


PUBLISHED = {
    "meta-llama/Llama-3.1-8B-Instruct": _model(
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 131072),
        8_030_261_248,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, **_LLAMA3_ROPE},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _model(
        "llama",
        (2048, 8192, 16, 32, 8, 128256, 131072),
        1_235_814_400,
        head_dim=64,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 32.0, **_LLAMA3_ROPE},
    ),
    "meta-llama/Meta-Llama-3-8B": _model("llama", (4096, 14336, 32, 32, 8, 128256, 8192), 8_030_261_248),
    "meta-llama/Llama-2-70b-chat-hf": _model("llama", (8192, 28672, 80, 64, 8, 32000, 4096), 68_976_648_192),
    "meta-llama/Llama-2-7b-hf": _model("llama", (4096, 11008, 32, 32, 32, 32000, 4096), 6_738_415_616),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _model("llama", (2048, 5632, 22, 32, 4, 32000, 2048), 1_100_048_384),
    "JackFram/llama-68m": _model("llama", (768, 3072, 2, 12, 12, 32000, 2048), 68_030_208),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _model(
        "llama", (576, 1536, 30, 9, 3, 49152, 8192), 134_515_008, tie_word_embeddings=True, rope_theta=100000.0
    ),
    "mistralai/Mistral-7B-v0.3": _model(
        "mistral", (4096, 14336, 32, 32, 8, 32768, 32768), 7_248_023_552, sliding_window=None, rope_theta=1000000.0
    ),
    "Qwen/Qwen2.5-32B-Instruct": _model("qwen2", (5120, 27648, 64, 40, 8, 152064, 32768), 32_763_876_352),
    "Qwen/Qwen2.5-7B-Instruct": _model("qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), 7_615_616_512),
    "Qwen/Qwen2.5-0.5B": _model("qwen2", (896, 4864, 24, 14, 2, 151936, 32768), 494_032_768, tie_word_embeddings=True),
    "Qwen/Qwen3-0.6B": _model(
        "qwen3", (1024, 3072, 28, 16, 8, 151936, 40960), 596_049_920, tie_word_embeddings=True, head_dim=128
    ),
}
