"""LLaMA, Mistral, Qwen2 and Qwen3 as TensorRT-LLM 1.2 networks that rotate queries and keys themselves.

TensorRT-LLM's own definitions leave RoPE to the attention plugin, which derives positions from lengths. A draft that
looks at the sequence through a bounded block table has fewer cached entries than its positions say, so here positions
are an input: the plugin is told `learned_absolute`, which makes it rotate nothing, and the network rotates by
`position_ids`. Weights and their names are those of the checkpoint. Target and draft are the same definition.

Importing this module needs `tensorrt_llm`; only the compile step does.
"""

from typing import Any

import torch
from tensorrt_llm._utils import pad_vocab_size
from tensorrt_llm.functional import (
    AttentionMaskType,
    LayerNormType,
    PositionEmbeddingType,
    Tensor,
    cast,
    concat,
    constant,
    embedding,
    gpt_attention,
    matmul,
    shape,
    split,
)
from tensorrt_llm.layers import Attention, ColumnLinear, Embedding, GatedMLP, RmsNorm
from tensorrt_llm.models.modeling_utils import DecoderModelForCausalLM
from tensorrt_llm.module import Module, ModuleList
from tensorrt_llm.parameter import Parameter

from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.rotary import Rotary

# Configuration keys that the definition reads beside TensorRT-LLM's own; `num_positions` comes from the build plan.
EXTRA_KEYS = ("rotary_base", "rotary_scaling", "attn_bias", "mlp_bias", "num_positions")


class ExplicitAttention(Attention):
    """Self-attention whose positions come from outside. Layer options are those of the checkpoint's configuration."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(
            local_layer_idx=layer_idx,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            attention_head_size=config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            qk_layernorm=config.qk_layernorm,
            layernorm_type=LayerNormType.RmsNorm if config.qk_layernorm else LayerNormType.LayerNorm,
            eps=config.norm_epsilon,
            attention_mask_type=AttentionMaskType.causal,
            bias=config.attn_bias,
            dense_bias=False,
            dtype=config.dtype,
            position_embedding_type=PositionEmbeddingType.learned_absolute,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            tp_rank=config.mapping.tp_rank,
            quant_mode=config.quant_mode,
        )

    def forward(
        self,
        hidden_states: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv_cache_params: Any,
        attention_params: Any,
    ) -> Tensor:
        """hidden_states: [T, hidden]; rotation: cosines and sines [T, 1, 1, head_size / 2] in the same type."""
        qkv = self._rotated(self.qkv(hidden_states), rotation)
        scales = self._scales()
        context, _ = gpt_attention(
            qkv=qkv,
            past_key_value=None,  # the cache is paged
            sequence_length=attention_params.sequence_length,
            host_past_key_value_lengths=kv_cache_params.host_past_key_value_lengths,
            host_max_attention_window_sizes=kv_cache_params.host_max_attention_window_sizes,
            host_sink_token_length=kv_cache_params.host_sink_token_length,
            context_lengths=attention_params.context_lengths,
            cache_indirection=kv_cache_params.cache_indirection,
            host_request_types=attention_params.host_request_types,
            layer_idx=self.local_layer_idx,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_kv_heads,
            num_kv_heads_origin=self.num_kv_heads,
            hidden_size_per_head=self.attention_head_size,
            q_scaling=self.q_scaling,
            rotary_embedding_max_positions=self.max_position_embeddings,
            position_embedding_type=PositionEmbeddingType.learned_absolute,
            kv_cache_quant_mode=self.quant_mode,
            max_context_length=attention_params.max_context_length,
            mask_type=self.attention_mask_type,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            kv_cache_block_offsets=kv_cache_params.kv_cache_block_offsets,
            host_kv_cache_block_offsets=kv_cache_params.host_kv_cache_block_offsets,
            host_kv_cache_pool_pointers=kv_cache_params.host_kv_cache_pool_pointers,
            host_kv_cache_pool_mapping=kv_cache_params.host_kv_cache_pool_mapping,
            host_context_lengths=attention_params.host_context_lengths,
            use_cache=True,
            host_runtime_perf_knobs=attention_params.host_runtime_perf_knobs,
            host_context_progress=attention_params.host_context_progress,
            **scales,
        )
        return self.dense(context)

    def _scales(self) -> dict[str, Any]:
        """Scales of an FP8 cache, and of an FP8 output where the build asks for FP8 context attention."""
        scales: dict[str, Any] = {}
        if self.kv_cache_scaling_factor is not None:
            scales["kv_orig_quant_scale"] = self.kv_cache_rcp_scaling_factor.value
            scales["kv_quant_orig_scale"] = self.kv_cache_scaling_factor.value
        if self.attention_output_orig_quant_scale is not None:
            scales["attention_output_orig_quant_scale"] = self.attention_output_orig_quant_scale.value
        return scales

    def _rotated(self, qkv: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rows [T, (heads + 2 * kv_heads) * head_size] with queries and keys normed (Qwen3) and rotated."""
        heads, kv_heads, size = self.num_attention_heads, self.num_attention_kv_heads, self.attention_head_size
        rows = shape(qkv, 0)
        query, key, value = split(qkv.view(concat([rows, heads + 2 * kv_heads, size])), [heads, kv_heads, kv_heads], 1)
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        both = concat([query, key], dim=1)
        both = both.view(concat([rows, heads + kv_heads, 2, size // 2]))
        both = _rotate(both, rotation).view(concat([rows, heads + kv_heads, size]))
        if self.kv_cache_scaling_factor is not None:
            both = self._turned(both)
        return concat([both, value], dim=1).view(concat([rows, (heads + 2 * kv_heads) * size]))

    def _turned(self, both: Tensor) -> Tensor:
        """Queries and keys [T, heads + kv_heads, head_size] as an FP8 cache stores keys; scores do not change."""
        query, key = split(both, [self.num_attention_heads, self.num_attention_kv_heads], 1)
        turn = Hadamard(self.attention_head_size, torch.float32)
        return concat([_times(query, turn.to_queries), _times(key, turn.to_keys)], dim=1)


class OffsetRmsNorm(RmsNorm):
    """A norm with a constant subtracted: the part of FP8 inputs that is not worth rounding (`builder.calibrate`)."""

    def __init__(self, config: Any) -> None:
        super().__init__(normalized_shape=config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)
        self.offset = Parameter(shape=(config.hidden_size,), dtype=config.dtype)

    def forward(self, x: Tensor, normalized_shape: Any = None) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        return super().forward(x, normalized_shape) - self.offset.value.view([1, self.offset.shape[0]])


class ExplicitLayer(Module):
    """One decoder layer."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        norm = OffsetRmsNorm if config.quant_mode.has_fp8_qdq() else _norm
        self.input_layernorm = norm(config)
        self.attention = ExplicitAttention(config, layer_idx)
        self.post_layernorm = norm(config)
        self.mlp = GatedMLP(
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            bias=config.mlp_bias,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            quant_mode=config.quant_mode,
        )

    def forward(
        self,
        hidden_states: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv_cache_params: Any,
        attention_params: Any,
    ) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.attention(normed, rotation, kv_cache_params, attention_params)
        return hidden_states + self.mlp(self.post_layernorm(hidden_states))


class ExplicitModel(Module):
    """Embedding, layers, final norm; named as in the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.vocab_embedding = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.layers = ModuleList([ExplicitLayer(config, index) for index in range(config.num_hidden_layers)])
        self.ln_f = _norm(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        kv_cache_params: Any,
        attention_params: Any,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]]:
        """Rows [T, hidden] from input_ids [T] and position_ids [T]; a paged cache has no tensors to return."""
        assert use_cache, "the engine is built with a paged cache"
        assert attention_mask is None, "the plugin masks by itself"
        hidden_states = self.vocab_embedding(input_ids)
        rotation = _rotation(self.config, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotation, kv_cache_params, attention_params)
        return self.ln_f(hidden_states), ()


class ExplicitForCausalLM(DecoderModelForCausalLM):
    """The whole network. config: TensorRT-LLM's PretrainedConfig of our checkpoint, with EXTRA_KEYS."""

    def __init__(self, config: Any) -> None:
        missing = [key for key in EXTRA_KEYS if not hasattr(config, key)]
        assert not missing, f"the configuration lacks {missing}"
        lm_head = ColumnLinear(
            config.hidden_size,
            pad_vocab_size(config.vocab_size, config.mapping.tp_size),
            bias=False,
            dtype=config.dtype,
            tp_group=config.mapping.tp_group,
            tp_size=config.mapping.tp_size,
            gather_output=True,
        )
        super().__init__(config, ExplicitModel(config), lm_head)


def _norm(config: Any) -> Any:
    return RmsNorm(normalized_shape=config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)


def _rotation(config: Any, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, 1, head_size / 2] of each row's position, in the model's type.

    Looked up in tables of `num_positions` rows rather than computed: a GPU's fast sine is poor at angles of a long
    context, and so the angles are exactly those of the PyTorch runner.
    """
    half = config.head_size // 2
    angles = Rotary(config.head_size, config.rotary_base, config.rotary_scaling, torch.float32)
    cosines, sines = angles.angles(torch.arange(config.num_positions))  # [positions, 1, head_size]
    looked_up = []
    for table in (cosines, sines):
        rows = embedding(position_ids, constant(table[:, 0, :half].contiguous().numpy()))
        looked_up.append(cast(rows.view(concat([shape(position_ids, 0), 1, 1, half])), config.dtype))
    return looked_up[0], looked_up[1]


def _times(x: Tensor, matrix: torch.Tensor) -> Tensor:
    """[T, heads, n] with a constant [n, n], whose entries are exact in any type."""
    heads, size = x.shape[1], x.shape[2]
    turned = matmul(x.view([-1, size]), cast(constant(matrix.numpy()), x.dtype))
    return turned.view(concat([shape(x, 0), heads, size]))


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Heads as [T, heads, 2, head_size / 2], the two halves of each head rotated into each other."""
    cosines, sines = rotation
    left, right = split(x, 1, dim=2)
    return concat([left * cosines - right * sines, right * cosines + left * sines], dim=2)
