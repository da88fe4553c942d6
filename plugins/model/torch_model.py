"""The decoder that a TensorRT-LLM checkpoint describes, in plain PyTorch: LLaMA, Mistral, Qwen2 and Qwen3."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from magicdec.plugins.attention import paged_attention, sequence_views
from magicdec.plugins.linear import Linear, load_embedding, load_linear
from magicdec.plugins.model.communicator import Communicator, SingleRank
from magicdec.plugins.model.inputs import ModelInput
from magicdec.plugins.model.kv_cache import KVCache
from magicdec.plugins.rotary import Rotary, rotate

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """The part of a checkpoint's config.json that shapes the computation."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: Mapping[str, Any] | None
    qk_layernorm: bool

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the TensorRT-LLM names."""
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_size"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            norm_epsilon=config["norm_epsilon"],
            rotary_base=config["rotary_base"],
            rotary_scaling=config["rotary_scaling"],
            qk_layernorm=config["qk_layernorm"],
        )

    def local_kv_heads(self, tp_size: int) -> int:
        """KV heads on each of `tp_size` ranks; where there are more ranks than heads, ranks share a head."""
        return max(self.num_kv_heads // tp_size, 1)


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer."""

    input_norm: torch.Tensor
    input_offset: torch.Tensor | None  # FP8: subtracted from the norm's output, and qkv's bias makes up for it
    qkv: Linear  # [q | k | v] rows
    query_norm: torch.Tensor | None  # Qwen3: over each head
    key_norm: torch.Tensor | None
    dense: Linear
    post_norm: torch.Tensor
    post_offset: torch.Tensor | None  # the same for gate and up
    gate: Linear  # passed through SiLU; TensorRT-LLM calls it fc
    up: Linear  # TensorRT-LLM calls it gate
    down: Linear

    @classmethod
    def from_checkpoint(cls, weights: Weights, index: int) -> "Layer":
        """Pick one layer's tensors by their TensorRT-LLM names."""
        prefix = f"transformer.layers.{index}."
        return cls(
            input_norm=weights[prefix + "input_layernorm.weight"],
            input_offset=weights.get(prefix + "input_layernorm.offset"),
            qkv=load_linear(weights, prefix + "attention.qkv."),
            query_norm=weights.get(prefix + "attention.q_layernorm.weight"),
            key_norm=weights.get(prefix + "attention.k_layernorm.weight"),
            dense=load_linear(weights, prefix + "attention.dense."),
            post_norm=weights[prefix + "post_layernorm.weight"],
            post_offset=weights.get(prefix + "post_layernorm.offset"),
            gate=load_linear(weights, prefix + "mlp.fc."),
            up=load_linear(weights, prefix + "mlp.gate."),
            down=load_linear(weights, prefix + "mlp.proj."),
        )


class TorchModel:
    """Forward pass over a paged cache. All arithmetic is in the norms' dtype, norms in at least float32.

    With several ranks the weights are one rank's: its own heads, its columns of the matrices that follow them (whose
    products are summed over the ranks), its rows of the output matrix. Every rank returns the whole logits.
    """

    def __init__(self, config: ModelConfig, weights: Weights, communicator: Communicator | None = None) -> None:
        self.config = config
        self.communicator = communicator or SingleRank()
        self.num_heads = config.num_heads // self.communicator.size
        self.num_kv_heads = config.local_kv_heads(self.communicator.size)
        self.embedding = load_embedding(weights, "transformer.vocab_embedding.")
        self.layers: Iterable[Layer] = [Layer.from_checkpoint(weights, index) for index in range(config.num_layers)]
        self.final_norm = weights["transformer.ln_f.weight"]
        self.head = load_linear(weights, "lm_head.")
        self.dtype, self.device = self.final_norm.dtype, self.final_norm.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.rotary = Rotary(config.head_size, config.rotary_base, config.rotary_scaling, self.wide)
        self.rotary.inverse_frequencies = self.rotary.inverse_frequencies.to(self.device)
        self.scale = config.head_size**-0.5

    def forward(self, inputs: ModelInput, cache: KVCache, block_size: int) -> torch.Tensor:
        """Logits [N, vocab_size] in at least float32."""
        device, dtype = self.device, self.dtype
        views = sequence_views(
            inputs.query_start_loc.tolist(), inputs.cache_lens.tolist(), inputs.block_table.tolist(), block_size
        )
        slots = inputs.slot_mapping.to(device)
        cos, sin = (angle.to(dtype) for angle in self.rotary.angles(inputs.positions.to(device)))
        hidden = self.embedding(inputs.input_ids.to(device), dtype)  # [T, hidden]
        for index, layer in enumerate(self.layers):
            query, key, value = self._project(layer, self._norm(hidden, layer.input_norm, layer.input_offset), cos, sin)
            if cache.turn is not None:
                query = cache.turn.queries(query)
            cache.write(index, slots, key, value)
            stored = cache.scale(index)
            mixed = paged_attention(query * (self.scale * stored), cache.keys[index], cache.values[index], views)
            mixed = mixed if stored == 1.0 else mixed * stored
            hidden = hidden + self.communicator.all_reduce(layer.dense(mixed.flatten(1)))
            normed = self._norm(hidden, layer.post_norm, layer.post_offset)
            inner = functional.silu(layer.gate(normed)) * layer.up(normed)
            hidden = hidden + self.communicator.all_reduce(layer.down(inner))
        wanted = self._norm(hidden[inputs.logits_indices.to(device)], self.final_norm)
        logits = self.communicator.all_gather(self.head(wanted))  # padded rows stand at the end
        return logits[:, : self.config.vocab_size].to(self.wide)

    def _project(
        self, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, heads, head_size], keys and values [T, kv_heads, head_size], rotated."""
        heads = layer.qkv(normed).view(len(normed), -1, self.config.head_size)
        query, key, value = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        """Root mean square norm (arXiv 1910.07467), less an offset."""
        wide = x.to(self.wide)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_epsilon)
        normed = weight * scaled.to(x.dtype)
        return normed if offset is None else normed - offset
