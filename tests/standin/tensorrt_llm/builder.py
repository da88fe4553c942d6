"""build(): the silent changes that the real one makes, then the recorded network as an engine."""

import copy
import json
from pathlib import Path
from typing import Any

from tensorrt.graph import Graph

from . import __version__
from ._common import Network, net_guard
from ._utils import get_sm_version
from .api import arguments
from .layers import Attention
from .models.modeling_utils import SpeculativeDecodingMode
from .parameter import Parameter
from .plugin import PluginConfig

_NAME = "tensorrt_llm.builder.BuildConfig"
_NONE = SpeculativeDecodingMode["NONE"]
_FP8_ALGORITHMS = ("FP8", "W4A8_AWQ", "NVFP4")


class LoraConfig:
    """No adapters."""

    def to_dict(self) -> dict[str, Any]:
        return {}


class BuildConfig:
    """Values over the defaults."""

    def __init__(self, **given: Any) -> None:
        names = {
            "SpeculativeDecodingMode": SpeculativeDecodingMode,
            "LoraConfig": LoraConfig,
            "PluginConfig": PluginConfig,
        }
        self.__dict__.update(arguments(_NAME, given, names))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"BuildConfig has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(f"BuildConfig has no {name!r}")
        self.__dict__[name] = value

    def to_dict(self) -> dict[str, Any]:
        values = dict(self.__dict__)
        return values | {"plugin_config": self.plugin_config.to_dict(), "lora_config": self.lora_config.to_dict()}


class EngineConfig:
    """What config.json of an engine says."""

    def __init__(self, pretrained_config: Any, build_config: BuildConfig, version: str) -> None:
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version

    def to_dict(self) -> dict[str, Any]:
        build = self.build_config.to_dict()
        for name in ("dry_run", "visualize_network"):
            build.pop(name)
        return {
            "version": self.version,
            "pretrained_config": self.pretrained_config.to_dict(),
            "build_config": build,
        }


class Engine:
    """The result of a build."""

    def __init__(self, config: EngineConfig, engine: bytes | None, managed_weights: Any = None) -> None:
        self.config, self.engine, self.managed_weights = config, engine, managed_weights or {}

    def save(self, engine_dir: str) -> None:
        directory, rank = Path(engine_dir), self.config.pretrained_config.mapping.rank
        directory.mkdir(exist_ok=True)
        if rank == 0:
            text = json.dumps(self.config.to_dict(), indent=4, default=str)
            (directory / "config.json").write_text(text)
        if self.engine is not None:
            (directory / f"rank{rank}.engine").write_bytes(self.engine)


def build(model: Any, build_config: BuildConfig) -> Engine:
    """Record the network of the model."""
    build_config = copy.deepcopy(build_config)
    plugins = build_config.plugin_config
    plugins.dtype = model.config.dtype
    _resolve_cache(build_config)
    _resolve_lengths(model.config, build_config)
    _resolve_fusions(model.config, plugins)
    _resolve_drafts(build_config)
    _resolve_fmha(model.config, plugins)
    plugins.nccl_plugin = model.config.dtype if model.config.mapping.world_size > 1 else None
    if plugins.use_fp8_context_fmha and model.config.quantization.quant_algo in _FP8_ALGORITHMS:
        _fuse_output_scale(model)
    network = Network(plugins)
    with net_guard(network):
        model(**model.prepare_inputs(**_input_sizes(build_config)))
    config = EngineConfig(model.config, build_config, __version__)
    graph: Graph = network.graph
    graph.facts = json.loads(json.dumps(config.to_dict() | {"rank": model.config.mapping.rank}, default=str))
    engine = None if build_config.dry_run else graph.serialize()
    if build_config.output_timing_cache is not None and model.config.mapping.rank == 0:
        Path(build_config.output_timing_cache).write_bytes(b"timing")
    return Engine(config, engine)


def _resolve_cache(build: BuildConfig) -> None:
    plugins = build.plugin_config
    if build.kv_cache_type is None:
        if plugins.paged_kv_cache is False:
            raise NotImplementedError("a contiguous cache is not in the stand-in")
        build.kv_cache_type = "PAGED"
    plugins.paged_kv_cache = True
    plugins.paged_state = False


def _resolve_lengths(config: Any, build: BuildConfig) -> None:
    scaling = getattr(config, "rotary_scaling", None) or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    factor = scaling.get("factor", 1.0) if kind not in ("su", "longrope", "llama3") else 1
    if build.max_seq_len is None:
        build.max_seq_len = int(-(-(config.max_position_embeddings or 2048) * factor // 1))
    build.max_input_len = min(build.max_input_len, build.max_seq_len)
    tokens = build.max_num_tokens
    if build.opt_num_tokens is None and not build.plugin_config.multiple_profiles:
        build.opt_num_tokens = min(build.max_batch_size * build.max_beam_width, tokens)
    tokens = min(tokens, build.max_seq_len * build.max_batch_size)
    if tokens < build.max_input_len and not build.plugin_config.context_fmha:
        tokens = build.max_input_len
    elif tokens < build.plugin_config.tokens_per_block and build.plugin_config.context_fmha:
        tokens = build.plugin_config.tokens_per_block
    build.max_num_tokens = tokens
    if build.opt_num_tokens is not None:
        build.opt_num_tokens = min(build.opt_num_tokens, tokens)


def _resolve_fusions(config: Any, plugins: PluginConfig) -> None:
    if plugins.streamingllm:
        plugins.use_paged_context_fmha = False
    if plugins.reduce_fusion and (config.mapping.tp_size == 1 or config.architecture != "LlamaForCausalLM"):
        plugins.reduce_fusion = False
    if plugins.user_buffer and not plugins.reduce_fusion:
        plugins.user_buffer = False
    if plugins.norm_quant_fusion and config.quantization.quant_algo != "NVFP4":
        plugins.norm_quant_fusion = False


def _resolve_drafts(build: BuildConfig) -> None:
    if build.speculative_decoding_mode == _NONE:
        return
    build.max_seq_len += build.max_draft_len
    build.max_num_tokens = max(build.max_num_tokens, build.max_batch_size * (build.max_draft_len + 1))


def _resolve_fmha(config: Any, plugins: PluginConfig) -> None:
    fp8_cache = config.quant_mode.has_fp8_kv_cache()
    if not plugins.context_fmha:
        plugins.use_fp8_context_fmha = plugins.use_paged_context_fmha = False
    elif config.quantization.quant_algo not in _FP8_ALGORITHMS or get_sm_version() < 89:
        plugins.use_fp8_context_fmha = False
        if fp8_cache:
            plugins.use_paged_context_fmha = False
    elif plugins.use_paged_context_fmha:
        plugins.use_fp8_context_fmha = fp8_cache
    if plugins.use_paged_context_fmha and config.quant_mode.has_int8_kv_cache():
        plugins.use_paged_context_fmha = False


def _fuse_output_scale(model: Any) -> None:
    for name, module, _ in model.named_modules_with_parent():
        if isinstance(module, Attention):
            scale = 1.0 / module.dense.activation_scaling_factor.raw_value
            module.attention_output_orig_quant_scale = Parameter(scale.numpy(), dtype="float32", is_buffer=True)
            module.attention_output_orig_quant_scale.name = f"{name}.attention_output_orig_quant_scale"


def _input_sizes(build: BuildConfig) -> dict[str, Any]:
    external = SpeculativeDecodingMode["DRAFT_TOKENS_EXTERNAL"]
    return {
        "max_batch_size": build.max_batch_size,
        "max_input_len": build.max_input_len,
        "max_seq_len": build.max_seq_len,
        "use_cache": True,
        "max_beam_width": build.max_beam_width,
        "max_num_tokens": build.max_num_tokens,
        "opt_num_tokens": build.opt_num_tokens,
        "prompt_embedding_table_size": build.max_prompt_embedding_table_size,
        "max_draft_len": build.max_draft_len,
        "speculative_decoding_draft_tokens_external": build.speculative_decoding_mode == external,
        "gather_context_logits": build.gather_context_logits,
        "lora_target_modules": None,
    }
