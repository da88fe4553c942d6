"""Reading config.json: what is understood, in both of transformers' spellings, and what is refused by name."""

from typing import Any

import pytest

from magicdec.builder.checkpoints.model_spec import ModelSpec, parse_config
from magicdec.errors import CheckpointError
from tests.builder.published import PUBLISHED, Published

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(has_lm_head: bool = True, **changes: Any) -> ModelSpec:
    return parse_config(BASE | changes, "config.json", has_lm_head=has_lm_head)


def qwen(kind: str, **changes: Any) -> ModelSpec:
    return parse(model_type=kind, architectures=[f"{kind.capitalize()}ForCausalLM"], **changes)


@pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_number_of_parameters_is_the_published_one(model: Published) -> None:
    assert model.spec.num_parameters == model.parameters


def test_defaults_where_transformers_leaves_a_key_out() -> None:
    spec = parse(num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_size, spec.norm_epsilon) == (4, 16, 1e-6)
    assert (spec.rotary_base, spec.rotary_scaling, spec.eos_token_ids) == (10000.0, None, ())


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_llama3_rope_in_every_spelling(spelling: dict[str, Any]) -> None:
    spec = parse(**spelling)
    assert spec.rotary_base == 5e5
    assert spec.rotary_scaling == {"type": "llama3", "rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_linear_rope(key: str) -> None:
    changes: dict[str, Any] = {key: {"rope_type": "linear", "factor": 4}}
    spec = parse(**changes)
    assert spec.rotary_scaling == {"type": "linear", "rope_type": "linear", "factor": 4.0}


def test_tied_embeddings_are_told_by_the_key_or_by_a_missing_head() -> None:
    assert parse(tie_word_embeddings=True).tied
    assert not parse(tie_word_embeddings=False, has_lm_head=False).tied
    assert parse(has_lm_head=False).tied
    assert not parse(has_lm_head=True).tied


def test_end_tokens_may_be_one_or_several() -> None:
    assert parse(eos_token_id=2).eos_token_ids == (2,)
    assert parse(eos_token_id=[2, 5]).eos_token_ids == (2, 5)


def test_trtllm_names_of_the_families() -> None:
    mistral = parse(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    assert mistral.architecture == "LlamaForCausalLM"
    qwen3 = qwen("qwen3", head_dim=32).to_trtllm("bfloat16", 2)
    assert (qwen3["architecture"], qwen3["qwen_type"], qwen3["head_size"]) == ("Qwen2ForCausalLM", "qwen3", 32)
    assert (qwen3["attn_bias"], qwen3["qk_layernorm"]) == (False, True)
    assert qwen3["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    qwen2 = qwen("qwen2").to_trtllm("float16", 1)
    assert (qwen2["qwen_type"], qwen2["attn_bias"], qwen2["qk_layernorm"]) == ("qwen2", True, False)
    assert "qwen_type" not in parse().to_trtllm("float32", 1)


def test_sliding_window_that_is_switched_off_is_no_obstacle() -> None:
    assert qwen("qwen2", use_sliding_window=False, sliding_window=131072, max_window_layers=21).family == "qwen2"
    longer = parse(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=4096)
    assert longer.max_position_embeddings == 4096


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, r"'MixtralForCausalLM'.*Supported: LLaMA"),
        ({"model_type": "gemma2", "architectures": None}, r"architecture is 'gemma2'"),
        ({"model_type": None, "architectures": None}, r"architecture is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"'LlamaForSequenceClassification'"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, r"'Qwen3MoeForCausalLM'"),
        ({**MISTRAL, "sliding_window": 4096}, r"sliding_window is 4096: .*not supported; use one without"),
        (MISTRAL, r"sliding_window is 4096"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 2048}, r"sliding_window is 2048"),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is 'sliding_attention'"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu': only 'silu' is supported"),
        ({"mlp_bias": True}, r"mlp_bias is True"),
        ({"attention_bias": True}, r"attention_bias is True"),
        ({"num_local_experts": 8}, r"num_local_experts is 8: mixtures of experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method is 'gptq': quantised checkpoints"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"'yarn': .*'linear' and 'llama3'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, r"'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling has no low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"one set of RoPE parameters"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, r"partial_rotary_factor is 0\.25"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"vocab_size": 0}, r"vocab_size is 0: a positive whole number"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers is 'two'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3: it does not divide num_attention_heads 4"),
        ({"head_dim": 15}, r"head_dim is 15: rotary embedding needs an even number"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan"),
        ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        parse(**changes)
    assert str(error.value).startswith("config.json: ")
