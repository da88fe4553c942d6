"""The base of decoder models: configuration, loading, input tensors, the step around the layers."""

import enum
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .._common import default_net
from ..api import SYMBOLS, arguments
from ..functional import PositionEmbeddingType, Tensor, gather_last_token_logits
from ..layers import Attention, AttentionParams, KeyValueCacheParams
from ..linear import ColumnLinear, RowLinear, fp8_linear
from ..mapping import Mapping
from ..module import Module
from ..quantization import ALGORITHMS, QuantMode
from .generation_mixin import basic_inputs

_MODE = SYMBOLS["tensorrt_llm.models.modeling_utils.SpeculativeDecodingMode"]["members"]
SpeculativeDecodingMode = enum.IntFlag("SpeculativeDecodingMode", _MODE)  # type: ignore[misc]
_QUANT = "tensorrt_llm.models.modeling_utils.QuantConfig"
_CONFIG = "tensorrt_llm.models.modeling_utils.PretrainedConfig"


class QuantConfig:
    """quant_algo and kv_cache_quant_algo must be known names; only FP8 can be executed."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(arguments(_QUANT, given, {}))
        for name in ("quant_algo", "kv_cache_quant_algo"):
            value = getattr(self, name)
            if value is not None and value not in ALGORITHMS:
                raise ValueError(f"{name} {value!r} is none of {ALGORITHMS}")
        self.quant_algo: str | None
        self.kv_cache_quant_algo: str | None

    @property
    def quant_mode(self) -> QuantMode:
        return QuantMode(0, fp8=self.quant_algo == "FP8", kv=self.kv_cache_quant_algo)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class PretrainedConfig:
    """Extra keys become attributes."""

    def __init__(self, **given: Any) -> None:
        declared = {name: value for name, value in given.items() if name in SYMBOLS[_CONFIG]}
        self.__dict__.update(arguments(_CONFIG, declared, {}))
        mapping, quantization, kind = self.mapping, self.quantization, self.position_embedding_type
        self.mapping: Any = Mapping.from_dict(mapping) if isinstance(mapping, dict) else mapping or Mapping()
        self.quantization: Any = QuantConfig(**(quantization or {}))
        self.position_embedding_type: Any = PositionEmbeddingType.from_string(kind)
        self.num_key_value_heads: Any = self.num_key_value_heads or self.num_attention_heads
        self.head_size: Any = self.head_size or self.hidden_size // self.num_attention_heads
        self.extra = [name for name in given if name not in declared]
        for name in self.extra:
            setattr(self, name, given[name])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"PretrainedConfig has no attribute {name!r}")

    @property
    def quant_mode(self) -> QuantMode:
        return self.quantization.quant_mode

    def set_rank(self, rank: int) -> None:
        assert 0 <= rank < self.mapping.world_size
        self.mapping.rank = rank

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in self.__dict__.items() if name != "extra"}
        values["position_embedding_type"] = str(self.position_embedding_type)
        values["mapping"] = {name: value for name, value in self.mapping.to_dict().items() if name != "rank"}
        values["quantization"] = self.quantization.to_dict()
        return values


class _PostInit(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = type.__call__(cls, *args, **kwargs)
        made.__post_init__()
        return made


class PretrainedModel(Module, metaclass=_PostInit):
    """Quantised after construction, as its configuration says; then loaded."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config

    def __post_init__(self) -> None:
        for name, module, parent in list(self.named_modules_with_parent()):
            if isinstance(module, Attention) and self.config.quant_mode.has_kv_cache_quant():
                module.quantise_cache()
            quantises = self.config.quant_mode.has_fp8_qdq() and name != "lm_head"
            if quantises and isinstance(module, ColumnLinear | RowLinear):
                parent.__dict__["_modules"][name.rsplit(".", 1)[-1]] = fp8_linear(module)
        for name, parameter in self.named_parameters():
            parameter.name = name

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Any:
        return cls(config)

    @classmethod
    def from_checkpoint(
        cls, ckpt_dir: str, rank: int | None = None, config: Any = None, *, preprocess_weights_hook: Any = None
    ) -> Any:
        if config is None:
            config = PretrainedConfig(**json.loads((Path(ckpt_dir) / "config.json").read_text()))
        if rank is not None:
            config.set_rank(rank)
        path = Path(ckpt_dir) / f"rank{config.mapping.rank}.safetensors"
        assert path.is_file(), path
        weights = safetensors.torch.load_file(path)
        if preprocess_weights_hook is not None:
            weights = preprocess_weights_hook(weights)
        model = cls(config)
        model.load(_preprocess(weights, config))
        return model

    def load(self, weights: dict[str, torch.Tensor], from_pruned: bool = False) -> None:
        wanted = {name for name, parameter in self.named_parameters() if not parameter.is_inited()}
        missing = wanted - set(weights)
        if missing:
            raise RuntimeError(f"Required but not provided tensors:{sorted(missing)}")
        self.unused = sorted(set(weights) - wanted)  # the real one warns
        for name, parameter in self.named_parameters():
            if name in weights:
                try:
                    parameter.value = weights[name]
                except ValueError as error:
                    raise RuntimeError(f"Encounter error '{error}' for parameter '{name}'") from error

    def prepare_inputs(self, **given: Any) -> dict[str, Any]:
        sizes = arguments("tensorrt_llm.models.modeling_utils.PretrainedModel.prepare_inputs", given, {})
        made = basic_inputs(self.config, default_net().plugin_config, sizes)
        names = AttentionParams.__dataclass_fields__
        caches = KeyValueCacheParams.__dataclass_fields__
        return {
            "input_ids": made["input_ids"],
            "position_ids": made["position_ids"],
            "use_cache": True,
            "last_token_ids": made.get("last_token_ids"),
            "attention_mask": None,
            "kv_cache_params": KeyValueCacheParams(
                past_key_value=[None] * self.config.num_hidden_layers,
                **{name: made[name] for name in caches if name in made},
            ),
            "attention_params": AttentionParams(
                max_context_length=sizes["max_input_len"], **{name: made[name] for name in names if name in made}
            ),
        }


def _preprocess(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Bytes seen as E4M3, the reciprocal of the cache's scale added, lm_head's scales dropped."""
    if config.quant_mode.has_fp8_qdq():
        weights = {
            name: data.view(torch.float8_e4m3fn) if data.dtype == torch.int8 and name.endswith("weight") else data
            for name, data in weights.items()
            if not (name.startswith("lm_head") and name.endswith("scaling_factor"))
        }
    for name in [name for name in weights if name.endswith(".kv_cache_scaling_factor")]:
        weights[name.replace("kv_cache_", "kv_cache_rcp_")] = 1.0 / weights[name]
    return weights


class DecoderModelForCausalLM(PretrainedModel):
    """The layers, then the wanted rows, then lm_head."""

    def __init__(self, config: PretrainedConfig, transformer: Module, lm_head: Module) -> None:
        super().__init__(config)
        self.transformer = transformer
        self.lm_head = lm_head
        Attention.create_attention_const_params(self, config)
        self.position_embedding_type = config.position_embedding_type

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Any = None,
        use_cache: bool = False,
        last_token_ids: Any = None,
        attention_mask: Any = None,
        kv_cache_params: Any = None,
        attention_params: Any = None,
        mrope_params: Any = None,
        hidden_states: Any = None,
        prompt_embedding_table: Any = None,
        prompt_tasks: Any = None,
        prompt_vocab_size: Any = None,
        lora_params: Any = None,
        spec_decoding_params: Any = None,
    ) -> Any:
        attention_params = Attention.fill_attention_params(self, attention_params)
        hidden, _ = self.transformer.forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
        )
        if last_token_ids is not None:
            removes = default_net().plugin_config.remove_input_padding
            hidden = gather_last_token_logits(hidden, last_token_ids, removes)
        logits = self.lm_head(hidden)
        logits.mark_output("logits", self.config.logits_dtype)
        return logits
