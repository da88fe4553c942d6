"""Which tensors a model has, and the refusal of a checkpoint that holds others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.errors import CheckpointError

AGAIN: Final = "Copy or download the checkpoint again."


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by Hugging Face's names; lm_head only where it is not the embedding."""
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_size
    sizes = {"q": spec.num_heads * head, "k": spec.num_kv_heads * head, "v": spec.num_kv_heads * head}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in (f"model.layers.{index}" for index in range(spec.num_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, size in sizes.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (size, hidden)
            if spec.has_qkv_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (size,)
        if spec.has_qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, sizes["q"])
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_shapes(spec: ModelSpec, found: Mapping[str, tuple[int, ...]], where: Path) -> dict[str, tuple[int, ...]]:
    """The expected shapes, after comparing them with what the checkpoint holds.

    CheckpointError for a missing tensor, another shape, or a tensor that the architecture does not know, since leaving
    it out would silently compute something else. rotary_emb.inv_freq (old LLaMA exports) and the lm_head of a model
    with tied embeddings are known to be redundant.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: tensor {name} is missing, the checkpoint is incomplete. {AGAIN}")
        if tuple(found[name]) != shape:
            got, want = list(found[name]), list(shape)
            raise CheckpointError(f"{where}: tensor {name} has shape {got}, the configuration calls for {want}.")
    extra = [name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    extra = [name for name in extra if not (spec.tied and name == "lm_head.weight")]
    if extra:
        raise CheckpointError(
            f"{where}: tensor {extra[0]} (of {len(extra)} such) is not part of a {spec.family} model as supported "
            "here; leaving it out would change what the model computes."
        )
    return expected
