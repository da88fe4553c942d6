"""The recorded network, and the bytes of an engine: magic, length, JSON (inputs, nodes, outputs, facts), weights."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

MAGIC = b"STANDIN1"
TORCH_DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "FP8": torch.float8_e4m3fn,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass
class Port:
    """An input or output. shape: -1 where it varies. profiles: for each profile the (min, opt, max) shapes."""

    name: str
    value: int
    dtype: str
    shape: list[int]
    profiles: list[list[list[int]]] = field(default_factory=list)


@dataclass
class Node:
    """One operation: values it reads and writes, by number, and what it is told at build time."""

    op: str
    inputs: list[int]
    outputs: list[int]
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """A whole network. weights: by name; a node `weight` names one. facts: configurations that it was built with."""

    inputs: list[Port] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def serialize(self) -> bytes:
        """The bytes of an engine file."""
        parts = {"inputs": self.inputs, "nodes": self.nodes, "outputs": self.outputs}
        head = {name: [asdict(item) for item in items] for name, items in parts.items()}  # type: ignore[attr-defined]
        text = json.dumps(head | {"facts": self.facts}).encode()
        weights = {name: tensor.contiguous() for name, tensor in self.weights.items()}
        return MAGIC + len(text).to_bytes(8, "little") + text + save(weights)

    @classmethod
    def deserialize(cls, data: bytes) -> "Graph":
        """Read such bytes; ValueError if they are none."""
        if data[:8] != MAGIC:
            raise ValueError("not an engine of the stand-in")
        size = int.from_bytes(data[8:16], "little")
        head = json.loads(data[16 : 16 + size])
        return cls(
            inputs=[Port(**port) for port in head["inputs"]],
            nodes=[Node(**node) for node in head["nodes"]],
            outputs=[Port(**port) for port in head["outputs"]],
            facts=head["facts"],
            weights=load(data[16 + size :]),
        )
