"""The network that is being recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorrt as trt
from tensorrt.graph import Graph, Node, Port


class Network:
    """Values are numbered in the order of their making; `types` and `shapes` hold what is known at build time."""

    def __init__(self, plugin_config: Any) -> None:
        self.plugin_config = plugin_config
        self.strongly_typed = True
        self.graph = Graph()
        self.count = 0
        self.parameters: dict[int, str] = {}

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def add_input(self, name: str, dtype: Any, shape: list[int], dim_range: dict[str, list[Any]]) -> int:
        value = self.new()
        count = len(next(iter(dim_range.values())))
        profiles = [
            [
                [size[profile] if isinstance(size[profile], int) else size[profile][end] for size in dim_range.values()]
                for end in range(3)
            ]
            for profile in range(count)
        ]
        assert len(dim_range) == len(shape)
        self.graph.inputs.append(Port(name, value, trt.DataType(dtype).name, list(shape), profiles))
        return value

    def add(self, op: str, inputs: list[int], count: int = 1, **attrs: Any) -> list[int]:
        outputs = [self.new() for _ in range(count)]
        self.graph.nodes.append(Node(op, inputs, outputs, attrs))
        return outputs

    def add_weight(self, name: str, data: Any) -> int:
        """A weight or constant; one that is named again is the same value."""
        for node in self.graph.nodes:
            if node.op == "weight" and node.attrs["name"] == name:
                return node.outputs[0]
        self.graph.weights[name] = data
        return self.add("weight", [], name=name)[0]


_NETWORKS: list[Network] = []


def default_net() -> Network:
    """The network inside `net_guard`."""
    if not _NETWORKS:
        raise RuntimeError("no network is being built")
    return _NETWORKS[-1]


@contextmanager
def net_guard(network: Network) -> Iterator[None]:
    """Record into this network."""
    _NETWORKS.append(network)
    try:
        yield
    finally:
        _NETWORKS.pop()
