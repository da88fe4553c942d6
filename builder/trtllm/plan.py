"""How an engine is to be built by TensorRT-LLM 1.2: every option, what the build will make of it, and what is refused.

TensorRT-LLM changes some options silently and turns others off; what it would do is said here before anything heavy
starts. The plan lists the options that are given and those that the build ends with; the two differ only where the
change is meant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from magicdec.builder.trtllm.rules import check_rules, notes
from magicdec.pair.config import GpuName, PairConfig, Role

SM_VERSIONS: Final[dict[GpuName, int]] = {"a100-80gb": 80, "h100-80gb": 90, "h200": 90}
NONE, EXTERNAL = "NONE", "DRAFT_TOKENS_EXTERNAL"
# Optimisation profiles are cut at these numbers of tokens; an engine for fewer than the first has one profile.
FIRST_PROFILE_TOKENS: Final = 64


@dataclass(frozen=True)
class EnginePlan:
    """One engine. checkpoint: its config.json. Lengths are in tokens.

    build, plugin: keyword arguments of BuildConfig and PluginConfig; what is not named keeps TensorRT-LLM's default.
    resolved_build, resolved_plugin: the same options as the build ends with. num_positions: rows of the table of
    rotations; it bounds position_ids. sm: compute capability, 90 = 9.0; None = that of the machine that builds.
    """

    role: Role
    checkpoint: Mapping[str, Any]
    build: Mapping[str, Any]
    plugin: Mapping[str, Any]
    resolved_build: Mapping[str, Any]
    resolved_plugin: Mapping[str, Any]
    num_positions: int
    sm: int | None
    notes: tuple[str, ...]

    @property
    def tp_size(self) -> int:
        """Ranks, one engine file each."""
        return int(self.checkpoint["mapping"]["tp_size"])

    def lines(self) -> list[str]:
        """The whole plan as text; `given -> result` where the build changes an option."""
        found = [f"{self.role}: {self.checkpoint['architecture']}, {self.tp_size} rank(s)", "  BuildConfig"]
        found += _pairs(self.build, self.resolved_build)
        found += [
            "  PluginConfig",
            *_pairs(self.plugin, self.resolved_plugin),
            f"  num_positions = {self.num_positions}",
        ]
        return found + [f"  note: {note}" for note in self.notes]


def plan_engines(config: PairConfig, checkpoints: Mapping[Role, Mapping[str, Any]]) -> dict[Role, EnginePlan]:
    """Plan the engine of each role. checkpoints: config.json of each role's TensorRT-LLM checkpoint.

    ConfigError lists every rule of TensorRT-LLM that the configuration breaks.
    """
    sm = SM_VERSIONS[config.gpu] if config.gpu is not None else None
    check_rules(config, checkpoints, sm)
    return {role: _plan(config, role, checkpoint, sm) for role, checkpoint in checkpoints.items()}


def _plan(config: PairConfig, role: Role, checkpoint: Mapping[str, Any], sm: int | None) -> EnginePlan:
    build, plugin = _build_options(config, role), _plugin_options(config, role, checkpoint)
    added = build["max_draft_len"] if build["speculative_decoding_mode"] == EXTERNAL else 0
    return EnginePlan(
        role=role,
        checkpoint=checkpoint,
        build=build,
        plugin=plugin,
        # What drafts add is meant: the configuration's max_seq_len counts prompt and output alone.
        resolved_build={**build, "max_seq_len": build["max_seq_len"] + added, "kv_cache_type": "PAGED"},
        resolved_plugin=plugin,
        num_positions=config.max_seq_len + config.draft.max_draft_len,
        sm=sm,
        notes=notes(config, role, checkpoint, sm),
    )


def _build_options(config: PairConfig, role: Role) -> dict[str, Any]:
    """A target verifies max_draft_len tokens a sequence; a draft reads a bounded view, one row of logits each.

    max_input_len bounds nothing where rows are packed and context attention is fused, but scratch memory is sized by
    it: a context has at most max_num_tokens rows.
    """
    target = role == "target"
    max_seq_len = config.max_seq_len if target else config.draft_budget
    max_num_tokens = min(config.max_num_tokens, config.max_batch_size * max_seq_len)
    several = max_num_tokens > FIRST_PROFILE_TOKENS
    rows = config.max_batch_size * (config.draft.most_draft_tokens + 1 if target else 1)
    return {
        "max_batch_size": config.max_batch_size,
        "max_beam_width": 1,
        "max_input_len": min(max_seq_len, max_num_tokens),
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        # With several profiles each is tuned for its own largest number of tokens.
        "opt_num_tokens": None if several else min(rows, max_num_tokens),
        "kv_cache_type": None,  # becomes PAGED by paged_kv_cache
        "gather_context_logits": False,
        "strongly_typed": True,
        "max_draft_len": config.draft.max_draft_len if target else 0,
        "speculative_decoding_mode": EXTERNAL if target else NONE,
    }


def _plugin_options(config: PairConfig, role: Role, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    dtype, quantization = checkpoint["dtype"], checkpoint["quantization"]
    fp8_weights, fp8_cache = (quantization[key] == "FP8" for key in ("quant_algo", "kv_cache_quant_algo"))
    parallel = checkpoint["mapping"]["tp_size"] > 1
    return {
        "dtype": dtype,
        "bert_attention_plugin": None,
        "gpt_attention_plugin": dtype,
        # TensorRT's own FP8 products are fused with what surrounds them, the plugin's are not.
        "gemm_plugin": None if fp8_weights else dtype,
        "nccl_plugin": dtype if parallel else None,
        "moe_plugin": None,
        "mamba_conv1d_plugin": None,
        "context_fmha": True,
        "paged_kv_cache": True,
        "paged_state": False,
        "remove_input_padding": True,
        "reduce_fusion": False,  # wants layers of TensorRT-LLM's own definitions
        "user_buffer": False,
        "norm_quant_fusion": False,
        "tokens_per_block": config.block_size,
        # Verification is a context with a past: without this the past is not looked at.
        "use_paged_context_fmha": True,
        "use_fp8_context_fmha": fp8_weights and fp8_cache,
        "multiple_profiles": _build_options(config, role)["opt_num_tokens"] is None,
        "streamingllm": False,  # gone in 1.2: the bounded block table takes its place
        # Fusing two FP8 layers rounds the weights of one of them anew; they stay as they were measured.
        "use_fused_mlp": not fp8_weights,
    }


def _pairs(given: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    return [
        f"    {name} = {given[name]}" + (f" -> {result[name]}" if result[name] != given[name] else "") for name in given
    ]
