"""Layers, by their real names, arguments and parameters; only what a dense decoder needs."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import functional as F
from .functional import AttentionMaskType, LayerNormType, PositionEmbeddingType, Tensor
from .linear import ColumnLinear, RowLinear
from .module import Module
from .parameter import Parameter
from .quantization import QuantMode

__all__ = ["AttentionMaskType", "PositionEmbeddingType"]


class Embedding(Module):
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: Any = None,
        tp_size: int = 1,
        tp_group: Any = None,
        sharding_dim: int = 0,
        tp_rank: Any = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        self.weight = Parameter(shape=(num_embeddings, embedding_dim), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight.value)


class RmsNorm(Module):
    def __init__(
        self,
        normalized_shape: Any,
        num_groups: int = 1,
        eps: float = 1e-06,
        elementwise_affine: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        assert num_groups == 1
        assert elementwise_affine
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.weight = Parameter(shape=self.normalized_shape, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, normalized_shape: Any = None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.value, self.eps)


class GatedMLP(Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        hidden_act: str,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        quant_mode: Any = None,
        inner_layernorm: bool = False,
        eps: float = 1e-05,
        is_expert: bool = False,
    ) -> None:
        super().__init__()
        if hidden_act not in F.ACT2FN:
            raise ValueError(f"unsupported activation function: {hidden_act}")
        assert not inner_layernorm
        self.hidden_act = hidden_act
        wide: dict[str, Any] = {"bias": bias, "dtype": dtype, "tp_group": tp_group, "tp_size": tp_size}
        self.fc = ColumnLinear(hidden_size, ffn_hidden_size, gather_output=False, **wide)
        self.proj = RowLinear(ffn_hidden_size, hidden_size, **wide)
        self.gate = ColumnLinear(hidden_size, ffn_hidden_size, gather_output=False, **wide)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.proj(F.ACT2FN[self.hidden_act](self.fc(hidden_states)) * self.gate(hidden_states))


class Attention(Module):
    """Its own forward pass lets the plugin rotate; that is no use here and refused: a subclass brings its own."""

    def __init__(
        self,
        *,
        local_layer_idx: int,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int | None = None,
        max_position_embeddings: int = 1024,
        num_layers: int = 1,
        attention_head_size: int | None = None,
        qk_layernorm: bool = False,
        layernorm_type: Any = LayerNormType.LayerNorm,
        layernorm_share: bool = True,
        eps: float = 1e-05,
        attention_mask_type: Any = AttentionMaskType.padding,
        bias: bool = True,
        dtype: Any = None,
        position_embedding_type: Any = PositionEmbeddingType.learned_absolute,
        rotary_embedding_base: float = 10000.0,
        rotary_embedding_scaling: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        quant_mode: Any = None,
        q_scaling: float = 1.0,
        dense_bias: bool | None = None,
    ) -> None:
        super().__init__()
        assert num_attention_heads % tp_size == 0, "num_attention_heads must be divisible by tp_size"
        self.local_layer_idx = local_layer_idx
        self.attention_head_size = attention_head_size or hidden_size // num_attention_heads
        self.num_attention_heads = num_attention_heads // tp_size
        whole = num_kv_heads or num_attention_heads
        self.num_attention_kv_heads = (whole + tp_size - 1) // tp_size
        self.num_kv_heads = whole
        self.attention_mask_type, self.position_embedding_type = attention_mask_type, position_embedding_type
        self.max_position_embeddings, self.q_scaling = max_position_embeddings, q_scaling
        self.quant_mode = quant_mode or QuantMode(0)
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.rotary_embedding_dim = self.attention_head_size if position_embedding_type.is_rope() else 0
        self.qk_layernorm = qk_layernorm
        self.register_parameter("kv_cache_scaling_factor", None)
        self.register_parameter("attention_output_orig_quant_scale", None)
        heads = tp_size * (self.num_attention_heads + 2 * self.num_attention_kv_heads)
        both: dict[str, Any] = {"dtype": dtype, "tp_group": tp_group, "tp_size": tp_size}
        self.qkv = ColumnLinear(
            hidden_size, heads * self.attention_head_size, bias=bias, gather_output=False, is_qkv=True, **both
        )
        self.dense = RowLinear(
            num_attention_heads * self.attention_head_size,
            hidden_size,
            bias=bias if dense_bias is None else dense_bias,
            **both,
        )
        if qk_layernorm:
            assert layernorm_type == LayerNormType.RmsNorm
            assert layernorm_share
            self.q_layernorm = RmsNorm(self.attention_head_size, eps=eps, dtype=dtype)
            self.k_layernorm = RmsNorm(self.attention_head_size, eps=eps, dtype=dtype)

    @staticmethod
    def create_attention_const_params(model_cls: Any, config: Any) -> None:
        if config.position_embedding_type.is_rope():
            table = np.zeros((config.max_position_embeddings, 1), dtype=np.float32)
            model_cls.register_parameter("embed_positions", Parameter(table, dtype="float32", is_buffer=True))

    @staticmethod
    def fill_attention_params(model_cls: Any, attention_params: Any) -> Any:
        return attention_params

    def quantise_cache(self) -> None:
        self.kv_cache_scaling_factor = Parameter(shape=(1,), dtype="float32")
        self.kv_cache_rcp_scaling_factor = Parameter(shape=(1,), dtype="float32")


@dataclass
class AttentionParams:
    sequence_length: Any = None
    context_lengths: Any = None
    host_context_lengths: Any = None
    max_context_length: Any = None
    host_request_types: Any = None
    host_runtime_perf_knobs: Any = None
    host_context_progress: Any = None

    def is_valid(self, gpt_attention_plugin: Any, remove_input_padding: Any, use_kv_cache: Any) -> bool:
        return bool(gpt_attention_plugin and remove_input_padding and use_kv_cache)


@dataclass
class KeyValueCacheParams:
    past_key_value: list[Any] = field(default_factory=list)
    host_past_key_value_lengths: Any = None
    host_max_attention_window_sizes: Any = None
    host_sink_token_length: Any = None
    kv_cache_block_offsets: Any = None
    host_kv_cache_block_offsets: Any = None
    host_kv_cache_pool_pointers: Any = None
    host_kv_cache_pool_mapping: Any = None
    cache_indirection: Any = None

    def get_first_past_key_value(self) -> Any:
        return self.past_key_value[0] if self.past_key_value else None
