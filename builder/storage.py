"""In which number format each tensor of a rank file is stored: 16 or 32 bit, FP8, int8 or int4 with their scales.

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
from typing import Literal

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.builder.shard import OutputTensor, Piece, plan_offsets, plan_rank
from magicdec.pair.config import DtypeName, KvDtypeName, PairConfig, Role, WeightOnly
from magicdec.plugins.weight_only import GROUP

StoredName = KvDtypeName | Literal["int8", "uint8"]
DTYPE_BYTES: dict[StoredName, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
}
_LINEAR = ("attention.qkv.", "attention.dense.", "mlp.fc.", "mlp.gate.", "mlp.proj.")
TABLES = ("transformer.vocab_embedding.weight", "lm_head.weight")
WEIGHT_OFFSET = "weights_offset"
WEIGHT_SCALE, INPUT_SCALE, KV_SCALE = "weights_scaling_factor", "activation_scaling_factor", "kv_cache_scaling_factor"


@dataclass(frozen=True)
class Storage:
    """What one model is stored in: its dtype of computation, and whether linear layers and KV cache are FP8, or weights
    less.

    weight_only: the draft's int8 or int4, None otherwise.
    """

    dtype: DtypeName
    fp8_weights: bool = False
    fp8_kv: bool = False
    weight_only: WeightOnly | None = None

    @property
    def needs_calibration(self) -> bool:
        return self.fp8_weights or self.fp8_kv or self.weight_only is not None

    @property
    def quant_algo(self) -> Literal["FP8", "W8A16", "W4A16"] | None:
        """TensorRT-LLM's name of how the linear layers are stored."""
        if self.weight_only is not None:
            return "W8A16" if self.weight_only == "int8" else "W4A16"
        return "FP8" if self.fp8_weights else None

    @classmethod
    def of(cls, config: PairConfig, role: Role) -> "Storage":
        """What a pair's configuration says about its target or draft."""
        own_cache = role == "target" or config.has_draft_cache
        return cls(
            config.dtype,
            fp8_weights=config.quantization_of(role) == "fp8",
            fp8_kv=own_cache and config.kv_cache_dtype_of(role) == "fp8",
            weight_only=config.quantization.weight_only_draft if role == "draft" else None,
        )


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a rank file.

    data: where its numbers come from, None for a scale. calibrated: they are calibration's, by the source's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredName
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
        if storage.weight_only is not None and (is_linear_weight(tensor.name) or tensor.name in TABLES):
            tensors += weight_only_tensors(tensor, storage.weight_only)
        elif tensor.name not in replaced:
            tensors.append(StoredTensor(tensor.name, tensor.shape, "fp8" if fp8 else storage.dtype, tensor, fp8))
    tensors += [StoredTensor(tensor.name, tensor.shape, storage.dtype, tensor, True) for tensor in offsets]
    names = scale_names(spec, storage)
    scales = [StoredTensor(name, (1,), "float32", None) for name in names]
    return sorted([*scales, *tensors], key=lambda tensor: -DTYPE_BYTES[tensor.dtype])


def weight_only_tensors(matrix: OutputTensor, kind: WeightOnly) -> list[StoredTensor]:
    """What is stored of a matrix: its numbers, scales and, in int4, offsets; by the source's names with our endings."""
    rows, columns = matrix.shape
    if kind == "int8" or matrix.name in TABLES:
        parts: list[tuple[str, tuple[int, ...], StoredName]]
        parts = [("weight", (rows, columns), "int8"), (WEIGHT_SCALE, (rows,), "float32")]
    else:
        groups = (rows, columns // GROUP)
        parts = [("weight", (rows, columns // 2), "uint8")]
        parts += [(ending, groups, "float16") for ending in (WEIGHT_SCALE, WEIGHT_OFFSET)]
    return [
        StoredTensor(renamed(matrix.name, ending), shape, dtype, _part(matrix, ending, shape), calibrated=True)
        for ending, shape, dtype in parts
    ]


def renamed(name: str, ending: str) -> str:
    """A weight's name with another ending."""
    return name.removesuffix("weight") + ending


def _part(matrix: OutputTensor, ending: str, shape: tuple[int, ...]) -> OutputTensor:
    """The same rows of what was made of the source's matrix."""
    pieces = (Piece(piece.source and renamed(piece.source, ending), piece.rows) for piece in matrix.pieces)
    return OutputTensor(renamed(matrix.name, ending), shape, tuple(pieces))


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
