"""In which number format each tensor of a rank file is stored: 16 or 32 bit, and FP8 with its scales.

Names, shapes and dtypes of scales are those that TensorRT-LLM loads: a linear layer in FP8 has float32 [1]
`weights_scaling_factor` and `activation_scaling_factor`, an attention layer with an FP8 cache has
`kv_cache_scaling_factor`; a number stands for itself times the scale. Embedding, norms, biases and lm_head stay.

int8 and int4 weights of a draft are our own format (`plugins.weight_only`), of one rank. In int4 the linear layers
inside the decoder layers have uint8 [out, in / 2] `weight`, two numbers a byte, with float16 [out, in / 32]
`weights_scaling_factor` and `weights_offset`; in int8 they have int8 [out, in] `weight` with float32 [out]
`weights_scaling_factor`, as have `transformer.vocab_embedding.` and `lm_head.` in either case. Norms and biases stay.

With FP8 weights, `input_layernorm.offset` and `post_layernorm.offset` [hidden] are subtracted from the inputs of qkv,
fc and gate before these are rounded, and their biases make up for it. The offsets are ours: the network of
`plugins.trtllm_models` has them.
"""

import math
from dataclasses import dataclass

from magicdec.builder.model_spec import ModelSpec
from magicdec.builder.shard import OutputTensor, plan_offsets, plan_rank
from magicdec.runtime.manifest import DtypeName, KvDtypeName, PairConfig, Role

DTYPE_BYTES: dict[KvDtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_LINEAR = ("attention.qkv.", "attention.dense.", "mlp.fc.", "mlp.gate.", "mlp.proj.")
WEIGHT_SCALE, INPUT_SCALE, KV_SCALE = "weights_scaling_factor", "activation_scaling_factor", "kv_cache_scaling_factor"


@dataclass(frozen=True)
class Storage:
    """Of one model: the dtype it computes in, and whether its linear layers and its KV cache are FP8."""

    dtype: DtypeName
    fp8_weights: bool = False
    fp8_kv: bool = False

    @property
    def needs_calibration(self) -> bool:
        return self.fp8_weights or self.fp8_kv

    @classmethod
    def of(cls, config: PairConfig, role: Role) -> "Storage":
        """What a pair's configuration says about its target or draft."""
        return cls(config.dtype, config.quantization_of(role) == "fp8", config.kv_cache_dtype_of(role) == "fp8")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a rank file.

    data: where its numbers come from, None for a scale. calibrated: they are calibration's, by the source's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: KvDtypeName
    data: OutputTensor | None
    calibrated: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def stored_tensors(spec: ModelSpec, rank: int, tp_size: int, storage: Storage) -> list[StoredTensor]:
    """The tensors of rank{rank}.safetensors, widest dtype first, so that each stands at a multiple of its size."""
    tensors = []
    offsets = plan_offsets(spec, rank, tp_size) if storage.fp8_weights else []
    replaced = {tensor.name for tensor in offsets}
    for tensor in plan_rank(spec, rank, tp_size):
        fp8 = storage.fp8_weights and is_linear_weight(tensor.name)
        if tensor.name not in replaced:
            tensors.append(StoredTensor(tensor.name, tensor.shape, "fp8" if fp8 else storage.dtype, tensor, fp8))
    tensors += [StoredTensor(tensor.name, tensor.shape, storage.dtype, tensor, True) for tensor in offsets]
    names = scale_names(spec, storage)
    scales = [StoredTensor(name, (1,), "float32", None) for name in names]
    return sorted([*scales, *tensors], key=lambda tensor: -DTYPE_BYTES[tensor.dtype])


def scale_names(spec: ModelSpec, storage: Storage) -> list[str]:
    """All scales of the model; every rank holds the same ones."""
    names = []
    for layer in (f"transformer.layers.{index}." for index in range(spec.num_layers)):
        if storage.fp8_weights:
            names += [f"{layer}{linear}{scale}" for linear in _LINEAR for scale in (WEIGHT_SCALE, INPUT_SCALE)]
        if storage.fp8_kv:
            names.append(f"{layer}attention.{KV_SCALE}")
    return names


def is_linear_weight(name: str) -> bool:
    """Whether this is the matrix of a linear layer inside the decoder layers."""
    return name.endswith(tuple(f"{linear}weight" for linear in _LINEAR))


def rank_bytes(spec: ModelSpec, rank: int, tp_size: int, storage: Storage) -> int:
    """Bytes of one rank file's tensors."""
    return sum(tensor.num_bytes for tensor in stored_tensors(spec, rank, tp_size, storage))


def disk_bytes(spec: ModelSpec, tp_size: int, storage: Storage) -> int:
    """Bytes of all rank files of one model."""
    return sum(rank_bytes(spec, rank, tp_size, storage) for rank in range(tp_size))
