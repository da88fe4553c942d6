"""The build plan: every rule has its error, and what is planned is what the build ends with."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from magicdec.builder.build import build_pair
from magicdec.builder.config import config_names, load_config
from magicdec.builder.trtllm.compile import compile_engines
from magicdec.builder.trtllm.plan import EnginePlan, plan_engines
from magicdec.errors import BuildError, ConfigError
from magicdec.pair.config import ROLES, PairConfig, Role
from tests.builder.engines import tiny_config
from tests.support.tiny_models import write_tiny_checkpoint
from tests.support.trtllm import read_checkpoint

CHECKPOINT: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rotary_scaling": None,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
}
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def config(**changes: Any) -> PairConfig:
    draft = {"kind": "model", "window_size": 512, **changes.pop("draft", {})}
    return tiny_config(**{"backend": "trtllm", "dtype": "bfloat16", "gpu": "h100-80gb", "draft": draft} | changes)


def plans(settings: PairConfig, **changes: Any) -> Mapping[Role, EnginePlan]:
    return plan_engines(settings, {role: CHECKPOINT | changes for role in ROLES})


def broken(settings: PairConfig, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plans(settings, **changes)
    return str(caught.value)


def test_target_and_draft() -> None:
    """The target's max_seq_len grows by max_draft_len, as TensorRT-LLM does it; the draft holds its budget only."""
    settings = config(max_seq_len=4096, max_num_tokens=1024, max_batch_size=4)
    both = plans(settings)
    target, draft = both["target"], both["draft"]
    assert (target.build["max_seq_len"], target.resolved_build["max_seq_len"]) == (4096, 4104)
    assert target.build["speculative_decoding_mode"] == "DRAFT_TOKENS_EXTERNAL"
    assert target.build["max_draft_len"] == 8
    assert draft.build["max_seq_len"] == draft.resolved_build["max_seq_len"] == settings.draft_budget == 560
    assert (draft.build["speculative_decoding_mode"], draft.build["max_draft_len"]) == ("NONE", 0)
    for plan in both.values():
        assert plan.plugin["tokens_per_block"] == settings.block_size
        assert plan.plugin["use_paged_context_fmha"] is True
        assert plan.plugin["use_fp8_context_fmha"] is False
        assert plan.num_positions == 4104  # a draft's positions are those of the whole sequence
        assert plan.sm == 90


def test_fp8_wants_its_own_kernels() -> None:
    fp8 = plans(config(), quantization=FP8)["target"].plugin
    assert (fp8["use_fp8_context_fmha"], fp8["gemm_plugin"], fp8["use_fused_mlp"]) == (True, None, False)
    weights_only = plans(config(), quantization=FP8 | {"kv_cache_quant_algo": None})["target"].plugin
    assert weights_only["use_fp8_context_fmha"] is False


def test_small_engines_have_one_profile() -> None:
    """TensorRT-LLM cannot cut 64 tokens or fewer into several profiles."""
    small = plans(config(max_num_tokens=64, max_batch_size=2))["target"]
    assert (small.plugin["multiple_profiles"], small.build["opt_num_tokens"]) == (False, 10)
    large = plans(config(max_num_tokens=65, max_batch_size=2))["target"]
    assert (large.plugin["multiple_profiles"], large.build["opt_num_tokens"]) == (True, None)


def test_float32_is_refused() -> None:
    text = broken(config(dtype="float32"), dtype="float32")
    assert "'float32' of the target" in text
    assert "does not look at cached keys" in text
    assert "--dtype bfloat16" in text


def test_fp8_on_a100_is_refused() -> None:
    text = broken(config(gpu="a100-80gb"), quantization=FP8)
    assert "FP8 of the draft on compute capability 8.0" in text
    assert "turn paged context attention off" in text
    assert "h100-80gb or h200" in text


@pytest.mark.parametrize("weights", [None, "W8A16"])
def test_fp8_cache_without_fp8_weights_is_refused(weights: str | None) -> None:
    text = broken(config(), quantization={"quant_algo": weights, "kv_cache_quant_algo": "FP8"})
    assert "FP8 KV cache of the target with weights in bfloat16" in text
    assert "can no longer be verified" in text or "could then no longer be verified" in text
    assert "kv_cache_dtype auto" in text


def test_int8_cache_is_refused() -> None:
    text = broken(config(), quantization={"quant_algo": None, "kv_cache_quant_algo": "INT8"})
    assert "INT8 KV cache" in text
    assert "fp8 or auto" in text


def test_num_tokens_must_hold_a_verification() -> None:
    settings = config(max_batch_size=16, max_num_tokens=100, draft={"max_draft_len": 8, "num_draft_tokens": 4})
    text = broken(settings)
    assert "16 * (8 + 1) = 144: TensorRT-LLM would raise it to 144" in text
    assert plans(config(max_batch_size=16, max_num_tokens=144))["target"].build["max_num_tokens"] == 144


def test_num_tokens_must_hold_a_block() -> None:
    text = broken(config(max_batch_size=1, max_num_tokens=24, block_size=32))
    assert "less than block_size 32" in text


@pytest.mark.parametrize("size", [4, 256])
def test_block_size_must_have_kernels(size: int) -> None:
    text = broken(config(block_size=size, draft={"window_size": 512, "max_draft_len": 4}))
    assert f"block_size {size} (TensorRT-LLM's tokens_per_block)" in text
    assert f"Use {min(max(size, 8), 128)}" in text


def test_draft_budget_must_be_within_its_training() -> None:
    text = broken(config(), max_position_embeddings=256)
    assert "budget of 560 tokens" in text
    assert "at most 208" in text
    plans(config(draft={"window_size": 208}), max_position_embeddings=256)
    plans(config(), max_position_embeddings=256, rotary_scaling={"rope_type": "linear", "factor": 4.0})
    plans(config(beyond_trained_len=True), max_position_embeddings=256)


def test_tensor_parallel() -> None:
    assert "does not divide the target's 32" in broken(config(), mapping={"world_size": 3, "tp_size": 3, "pp_size": 1})
    assert "only tensor parallelism" in broken(config(), mapping={"world_size": 2, "tp_size": 1, "pp_size": 2})
    assert plans(config(), mapping={"world_size": 2, "tp_size": 2})["target"].plugin["nccl_plugin"] == "bfloat16"


def test_every_broken_rule_is_named() -> None:
    text = broken(config(max_batch_size=16, max_num_tokens=100, dtype="float32"), dtype="float32")
    assert text.count("\n- ") == 3


def test_lines_say_what_changes() -> None:
    lines = plans(config(gpu=None, max_num_tokens=32768, max_batch_size=8, max_seq_len=2048))["target"].lines()
    text = "\n".join(lines)
    assert "max_seq_len = 2048 -> 2056" in text
    assert "kv_cache_type = None -> PAGED" in text
    assert "use_paged_context_fmha = True\n" in text
    assert "note: gpu is not named" in text
    assert "note: max_num_tokens 32768 is lowered to 16384" in text


def build_once(directory: Path, settings: PairConfig) -> dict[Role, EnginePlan]:
    """Build a tiny pair by this configuration; compile_engines compares the outcome with the plan."""
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    draft: Any = checkpoint if settings.draft.kind == "model" else settings.draft.kind
    pair = build_pair(checkpoint, draft, settings.model_copy(update={"backend": "torch"}), directory / "pair")
    roles: tuple[Role, ...] = ("target", "draft") if settings.draft.kind == "model" else ("target",)
    both = plan_engines(settings, {role: read_checkpoint(pair / role) for role in roles})
    for role, plan in both.items():
        compile_engines(pair / role, plan, workers=0)
    return both


@pytest.mark.usefixtures("standin")
def test_planned_is_what_the_build_ends_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not only the vital options: all of them, over small and large engines."""
    grid = itertools.product((1, 8), (64, 640, 100_000), ("bfloat16", "float32"), ("self", "model"))
    for index, (batch, tokens, dtype, kind) in enumerate(grid):
        settings = config(
            max_batch_size=batch, max_num_tokens=max(tokens, batch * 9), dtype=dtype, draft={"kind": kind}
        )
        build_once(tmp_path / str(index), settings)
    assert not caplog.records


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(("draft_weights", "draft_cache"), [("none", "auto"), ("fp8", "auto"), ("fp8", "fp8")])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_planned_is_what_an_fp8_build_ends_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, draft_weights: str, draft_cache: str, cache: str
) -> None:
    draft = {"kv_cache_dtype": draft_cache, "window_size": 64}
    quantization = {"target": "fp8", "draft": draft_weights}
    build_once(tmp_path, config(quantization=quantization, kv_cache_dtype=cache, draft=draft))
    assert not caplog.records


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(
    ("option", "value"),
    [("use_paged_context_fmha", False), ("tokens_per_block", 32), ("context_fmha", False)],
)
def test_a_changed_vital_option_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: Any
) -> None:
    from tensorrt_llm import builder

    real = builder.build

    def build(model: Any, build_config: Any) -> Any:
        engine = real(model, build_config)
        setattr(engine.config.build_config.plugin_config, option, value)
        return engine

    monkeypatch.setattr(builder, "build", build)
    with pytest.raises(BuildError, match=f"must not change: {option} .* to {value}"):
        build_once(tmp_path, config())


@pytest.mark.usefixtures("standin")
def test_another_changed_option_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorrt_llm import builder

    real = builder.build

    def build(model: Any, build_config: Any) -> Any:
        engine = real(model, build_config)
        engine.config.build_config.plugin_config.use_fused_mlp = False
        return engine

    monkeypatch.setattr(builder, "build", build)
    build_once(tmp_path, config())
    assert "use_fused_mlp True to False" in caplog.text


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(
    ("gpu", "here", "text"), [("h100-80gb", 80, "9.0, the GPU here 8.0"), ("a100-80gb", 90, "8.0")]
)
def test_the_gpu_here_must_be_the_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, here: int, text: str
) -> None:
    monkeypatch.setenv("MAGICDEC_STANDIN_SM", str(here))
    with pytest.raises(BuildError, match=text):
        build_once(tmp_path, config(gpu=gpu))


@pytest.mark.parametrize("name", config_names())
def test_shipped_configurations_break_no_rule(name: str) -> None:
    shipped = load_config(name)
    roles: tuple[Role, ...] = ("target", "draft") if shipped.draft.kind == "model" else ("target",)
    checkpoints: dict[Role, dict[str, Any]] = {role: CHECKPOINT | {"dtype": shipped.dtype} for role in roles}
    assert set(plan_engines(shipped, checkpoints)) == set(roles)
