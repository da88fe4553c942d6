"""Tensors of a model as Triton's config.pbtxt declares them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DataType = Literal["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP32", "STRING"]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output.

    dims: without the batch dimension; -1 is any length. scalar: the model sees [B] in place of [B, 1].
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    scalar: bool = False

    def text(self, *, is_input: bool) -> str:
        """The tensor as a message of config.pbtxt."""
        lines = [f'    name: "{self.name}"', f"    data_type: TYPE_{self.data_type}", f"    dims: {list(self.dims)}"]
        if self.scalar:
            lines.append("    reshape: { shape: [ ] }")
        if is_input and self.optional:
            lines.append("    optional: true")
        if is_input and -1 in self.dims:
            lines.append("    allow_ragged_batch: true")
        return "\n".join(["  {", *lines, "  }"])


def required(name: str, data_type: DataType, *dims: int, scalar: bool = False) -> TensorSpec:
    """An input that every request has."""
    return TensorSpec(name, data_type, dims or (1,), scalar=scalar)


def optional(data_type: DataType, *names: str, dims: tuple[int, ...] = (1,), scalar: bool = False) -> list[TensorSpec]:
    """Inputs of one type that a request may leave out."""
    return [TensorSpec(name, data_type, dims, optional=True, scalar=scalar) for name in names]


def outputs(data_type: DataType, *names: str, dims: tuple[int, ...] = (1,)) -> list[TensorSpec]:
    """Outputs of one type."""
    return [TensorSpec(name, data_type, dims) for name in names]


def block(kind: Literal["input", "output"], tensors: Sequence[TensorSpec]) -> str:
    """The list of a model's inputs or outputs."""
    entries = ",\n".join(tensor.text(is_input=kind == "input") for tensor in tensors)
    return f"{kind} [\n{entries}\n]"
