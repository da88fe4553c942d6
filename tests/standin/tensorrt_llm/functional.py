"""Operations: each records one node, and refuses what a strongly typed network refuses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorrt as trt
import torch

from ._common import default_net
from ._utils import str_dtype_to_trt
from .api import SYMBOLS, arguments
from .enums import AttentionMaskType, LayerNormType, PositionEmbeddingType, RotaryScalingType
from .quantization import QuantMode

__all__ = ["AttentionMaskType", "LayerNormType", "PositionEmbeddingType", "RotaryScalingType"]
_INT_TYPES = (trt.int32, trt.int64)


class Tensor:
    """A value of the network. shape: -1 where it varies. sizes: the numbers, if it is a tensor of sizes."""

    def __init__(self, name: str, dtype: Any, shape: Sequence[int], dim_range: dict[str, list[Any]]) -> None:
        self.value = default_net().add_input(name, dtype, list(shape), dim_range)
        self.name, self.dtype, self.shape = name, dtype, list(shape)
        self.sizes: list[int] | None = None

    @classmethod
    def _made(cls, value: int, dtype: Any, shape: list[int], sizes: list[int] | None = None) -> "Tensor":
        tensor = cls.__new__(cls)
        tensor.value, tensor.dtype, tensor.shape, tensor.name, tensor.sizes = value, dtype, shape, "", sizes
        return tensor

    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def view(self, shape: Any, zero_is_placeholder: bool = True) -> "Tensor":
        return view(self, shape, zero_is_placeholder)

    def cast(self, dtype: Any) -> "Tensor":
        return cast(self, dtype)

    def mark_output(self, name: str, dtype: Any) -> None:
        from tensorrt.graph import Port

        wanted = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        out = cast(self, wanted)
        default_net().graph.outputs.append(Port(name, out.value, wanted.name, list(self.shape)))

    def __add__(self, other: "Tensor") -> "Tensor":
        return _elementwise("add", self, other)

    def __sub__(self, other: "Tensor") -> "Tensor":
        return _elementwise("sub", self, other)

    def __mul__(self, other: "Tensor") -> "Tensor":
        return _elementwise("mul", self, other)


def _elementwise(op: str, left: Tensor, right: Tensor) -> Tensor:
    if not isinstance(right, Tensor):
        raise TypeError(f"{op}: {right!r} is no Tensor")
    if left.dtype != right.dtype:
        raise RuntimeError(f"{op}: a strongly typed network cannot mix {left.dtype} and {right.dtype}")
    if left.ndim() != right.ndim():
        raise RuntimeError(f"{op}: shapes {left.shape} and {right.shape} have different ranks")
    shape = []
    for a, b in zip(left.shape, right.shape, strict=True):
        if a != b and 1 not in (a, b):
            raise RuntimeError(f"{op}: shapes {left.shape} and {right.shape} do not fit")
        shape.append(b if a == 1 else a)
    return Tensor._made(default_net().add(op, [left.value, right.value])[0], left.dtype, shape)


def constant(ndarray: np.ndarray[Any, Any]) -> Tensor:
    """A constant of the network."""
    data = torch.from_numpy(np.ascontiguousarray(ndarray))
    kinds = {torch.float32: trt.float32, torch.float16: trt.float16, torch.int32: trt.int32, torch.int64: trt.int64}
    network = default_net()
    value = network.add_weight(f"constant.{network.count}", data)
    return Tensor._made(value, kinds[data.dtype], list(data.shape))


def cast(input: Tensor, dtype: Any) -> Tensor:
    wanted = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
    if wanted == input.dtype:
        return input
    return Tensor._made(default_net().add("cast", [input.value], dtype=wanted.name)[0], wanted, list(input.shape))


def shape(input: Tensor, dim: int) -> Tensor:
    dim = dim % input.ndim()
    value = default_net().add("shape", [input.value], dim=dim)[0]
    return Tensor._made(value, trt.int64, [1], [input.shape[dim]])


def concat(inputs: Sequence[Any], dim: int = 0) -> Tensor:
    """Of tensors; or of sizes, where ints and tensors from `shape` may be mixed."""
    if any(isinstance(item, int) or item.sizes is not None for item in inputs):
        parts = [item if isinstance(item, int) else None for item in inputs]
        sizes = [size for item in inputs for size in ([item] if isinstance(item, int) else item.sizes or [])]
        found = [item.value for item in inputs if isinstance(item, Tensor)]
        value = default_net().add("concat_shape", found, parts=parts)[0]
        return Tensor._made(value, trt.int64, [len(sizes)], sizes)
    first = inputs[0]
    dim = dim % first.ndim()
    if len({item.dtype for item in inputs}) != 1:
        raise RuntimeError(f"concat: types differ: {[item.dtype for item in inputs]}")
    rest = [[size for axis, size in enumerate(item.shape) if axis != dim] for item in inputs]
    if any(sizes != rest[0] for sizes in rest):
        raise RuntimeError(f"concat along {dim}: shapes differ: {[item.shape for item in inputs]}")
    joined = list(first.shape)
    joined[dim] = sum(item.shape[dim] for item in inputs)
    return Tensor._made(default_net().add("concat", [t.value for t in inputs], dim=dim)[0], first.dtype, joined)


def split(tensor: Tensor, split_size_or_sections: Any, dim: int = 0) -> list[Tensor]:
    """The dimension must be known at build time and divide evenly."""
    dim = dim % tensor.ndim()
    total = tensor.shape[dim]
    if total == -1:
        raise RuntimeError(f"split: dimension {dim} of {tensor.shape} is not known at build time")
    sections = split_size_or_sections
    if isinstance(sections, int):
        assert total % sections == 0, f"split of {total} by {sections}"
        sections = [sections] * (total // sections)
    assert sum(sections) == total, f"split of {total} into {sections}"
    values = default_net().add("split", [tensor.value], len(sections), sections=list(sections), dim=dim)
    shapes = [[size if axis != dim else part for axis, size in enumerate(tensor.shape)] for part in sections]
    return [Tensor._made(value, tensor.dtype, made) for value, made in zip(values, shapes, strict=True)]


def view(input: Tensor, shape: Any, zero_is_placeholder: bool = True) -> Tensor:
    """shape: a list of ints, or a tensor of sizes."""
    sizes = list(shape.sizes or []) if isinstance(shape, Tensor) else list(shape)
    known = [size for size in sizes if size != -1]
    given = [size for size in input.shape if size != -1]
    one_varies = len(known) == len(sizes) - 1 and len(given) == len(input.shape) - 1
    if one_varies and np.prod(known) % np.prod(given) and np.prod(given) % np.prod(known):
        raise RuntimeError(f"view of {input.shape} as {sizes}")
    values = [input.value, shape.value] if isinstance(shape, Tensor) else [input.value]
    return Tensor._made(default_net().add("view", values, shape=sizes)[0], input.dtype, sizes)


def matmul(input: Tensor, mat2: Tensor, transa: bool = False, transb: bool = False) -> Tensor:
    assert not transa
    if input.dtype != mat2.dtype:
        raise RuntimeError(f"matmul: a strongly typed network cannot mix {input.dtype} and {mat2.dtype}")
    inner, outer = (mat2.shape[1], mat2.shape[0]) if transb else (mat2.shape[0], mat2.shape[1])
    if input.shape[-1] != inner:
        raise RuntimeError(f"matmul: {input.shape} and {mat2.shape} (transb={transb}) do not fit")
    value = default_net().add("matmul", [input.value, mat2.value], transb=transb)[0]
    return Tensor._made(value, input.dtype, [*input.shape[:-1], outer])


def embedding(
    input: Tensor, weight: Tensor, tp_size: int = 1, tp_group: Any = None, sharding_dim: int = 0, tp_rank: Any = None
) -> Tensor:
    assert tp_size == 1
    assert input.dtype in _INT_TYPES, f"embedding: indices are {input.dtype}"
    name = next((port.name for port in default_net().graph.inputs if port.value == input.value), "a value")
    value = default_net().add("embedding", [input.value, weight.value], what=name)[0]
    return Tensor._made(value, weight.dtype, [*input.shape, *weight.shape[1:]])


def silu(input: Tensor) -> Tensor:
    return Tensor._made(default_net().add("silu", [input.value])[0], input.dtype, list(input.shape))


ACT2FN = {"silu": silu}


def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor, eps: float) -> Tensor:
    if input.dtype != weight.dtype:
        raise RuntimeError(f"rms_norm: {input.dtype} and {weight.dtype}")
    assert list(weight.shape) == list(normalized_shape) == input.shape[-1:]
    value = default_net().add("rms_norm", [input.value, weight.value], eps=eps)[0]
    return Tensor._made(value, input.dtype, list(input.shape))


def gather_last_token_logits(hidden_states: Tensor, last_token_ids: Tensor, remove_input_padding: bool) -> Tensor:
    assert remove_input_padding
    value = default_net().add("gather_last_token_logits", [hidden_states.value, last_token_ids.value])[0]
    return Tensor._made(value, hidden_states.dtype, [-1, *hidden_states.shape[1:]])


def allreduce(tensor: Tensor, group: list[int]) -> Tensor:
    value = default_net().add("allreduce", [tensor.value], group=group)[0]
    return Tensor._made(value, tensor.dtype, list(tensor.shape))


def allgather(tensor: Tensor, group: list[int], gather_dim: int = 0) -> Tensor:
    dim = gather_dim % tensor.ndim()
    joined = list(tensor.shape)
    joined[dim] *= len(group)
    value = default_net().add("allgather", [tensor.value], group=group, dim=dim)[0]
    return Tensor._made(value, tensor.dtype, joined)


_ATTENTION = "tensorrt_llm.functional.gpt_attention"
_DEFAULT_NAMES = {
    "RotaryScalingType": RotaryScalingType,
    "PositionEmbeddingType": PositionEmbeddingType,
    "AttentionMaskType": AttentionMaskType,
    "QuantMode": QuantMode,
}
# What the plugin cannot do without, with a paged cache and packed rows.
_NEEDED = (
    "sequence_length",
    "host_past_key_value_lengths",
    "host_max_attention_window_sizes",
    "host_sink_token_length",
    "context_lengths",
    "cache_indirection",
    "host_request_types",
    "kv_cache_block_offsets",
    "host_kv_cache_block_offsets",
    "host_kv_cache_pool_pointers",
    "host_kv_cache_pool_mapping",
    "host_context_lengths",
    "host_runtime_perf_knobs",
    "host_context_progress",
)


def gpt_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The plugin with a paged cache; every argument must exist, every tensor that it reads must be given."""
    assert not args, "gpt_attention takes keywords only"
    assert SYMBOLS[_ATTENTION]
    given = arguments(_ATTENTION, kwargs, dict(_DEFAULT_NAMES))
    plugins = default_net().plugin_config
    assert plugins.gpt_attention_plugin
    assert plugins.paged_kv_cache
    assert plugins.remove_input_padding
    missing = [name for name in _NEEDED if not isinstance(given[name], Tensor)]
    if missing:
        raise RuntimeError(f"gpt_attention: {missing} must be tensors with a paged cache and packed rows")
    assert given["mask_type"] == AttentionMaskType.causal, "only causal attention"
    kind = given["position_embedding_type"]
    if kind == PositionEmbeddingType.learned_absolute:
        assert given["rotary_inv_freq"] is None
        assert given["rotary_cos_sin"] is None
        assert given["rotary_embedding_dim"] == 0, "rotary_embedding_dim must be 0 where the plugin rotates nothing"
    _check_sizes(given)
    quantised = given["kv_cache_quant_mode"].has_fp8_kv_cache()
    if quantised != isinstance(given["kv_quant_orig_scale"], Tensor):
        raise RuntimeError("gpt_attention: kv_quant_orig_scale must be given with an FP8 cache, and only then")
    tensors = {name: item for name, item in given.items() if isinstance(item, Tensor)}
    value = default_net().add(
        "gpt_attention",
        [item.value for item in tensors.values()],
        arguments=list(tensors),
        position_embedding_type=kind.name,
        tokens_per_block=plugins.tokens_per_block,
        use_paged_context_fmha=plugins.use_paged_context_fmha,
        use_fp8_context_fmha=plugins.use_fp8_context_fmha,
        kv_dtype="FP8" if quantised else given["qkv"].dtype.name,
        **{
            name: given[name]
            for name in ("num_heads", "num_kv_heads", "hidden_size_per_head", "q_scaling", "layer_idx")
        },
    )[0]
    width = given["num_heads"] * given["hidden_size_per_head"]
    fp8_out = plugins.use_fp8_context_fmha and isinstance(given["attention_output_orig_quant_scale"], Tensor)
    return Tensor._made(value, trt.fp8 if fp8_out else given["qkv"].dtype, [-1, width]), None


def _check_sizes(given: dict[str, Any]) -> None:
    width = (given["num_heads"] + 2 * given["num_kv_heads"]) * given["hidden_size_per_head"]
    if given["qkv"].shape != [-1, width]:
        raise RuntimeError(f"gpt_attention: qkv is {given['qkv'].shape}, expected [-1, {width}]")
    if given["num_heads"] % given["num_kv_heads"]:
        raise RuntimeError(f"gpt_attention: {given['num_heads']} heads over {given['num_kv_heads']} KV heads")
