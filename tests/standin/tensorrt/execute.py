"""Executes a recorded network in PyTorch, one operation after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from .attention import attention_plugin
from .collectives import all_gather, all_reduce
from .graph import TORCH_DTYPES, Graph
from .memory import StandinError

Values = dict[int, torch.Tensor]


def execute(graph: Graph, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs by name. inputs: by name, host tensors as they lie in memory."""
    values: Values = {port.value: inputs[port.name] for port in graph.inputs}
    for node in graph.nodes:
        if node.op == "weight":
            results = [graph.weights[node.attrs["name"]]]
        elif node.op == "gpt_attention":
            named = dict(zip(node.attrs["arguments"], [values[i] for i in node.inputs], strict=True))
            results = [attention_plugin(named, node.attrs)]
        else:
            found = OPERATIONS[node.op]([values[i] for i in node.inputs], node.attrs)
            results = found if isinstance(found, list) else [found]
        values.update(zip(node.outputs, results, strict=True))
    return {port.name: values[port.value] for port in graph.outputs}


def _embedding(args: Sequence[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    indices, table = args
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < len(table)):
        raise StandinError(f"an index of {attrs['what']} is out of its {len(table)} rows: {indices.tolist()}")
    return table[indices.long()]


def _view(args: Sequence[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    sizes = attrs["shape"]
    if len(args) > 1:
        sizes = [int(n) for n in args[1]]
    return args[0].reshape(sizes)


def _concat_shape(args: Sequence[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    found = iter(args)
    parts = [next(found).reshape(-1) if part is None else torch.tensor([part]) for part in attrs["parts"]]
    return torch.cat([part.to(torch.int64) for part in parts])


def _rms_norm(args: Sequence[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    x, weight = args
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + attrs["eps"])).to(x.dtype)


def _gather_rows(args: Sequence[torch.Tensor], _attrs: dict[str, Any]) -> torch.Tensor:
    """last_token_ids counts from 1."""
    hidden, last = args
    if not (int(last.min()) >= 1 and int(last.max()) <= len(hidden)):
        raise StandinError(f"last_token_ids {last.tolist()} are out of 1..{len(hidden)}")
    return hidden[last.long() - 1]


def _fp8_matmul(args: Sequence[torch.Tensor], attrs: dict[str, Any]) -> torch.Tensor:
    """Activations rounded to E4M3 by their static scale, unless they come so; products summed in float32."""
    x, weight, x_scale, weight_scale = args
    if x.dtype != torch.float8_e4m3fn:
        x = (x.float() * (1.0 / x_scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (x.float() @ weight.float().T * (x_scale * weight_scale)).to(TORCH_DTYPES[attrs["dtype"]])


OPERATIONS: dict[str, Callable[[Sequence[torch.Tensor], dict[str, Any]], torch.Tensor | list[torch.Tensor]]] = {
    "add": lambda a, _: a[0] + a[1],
    "sub": lambda a, _: a[0] - a[1],
    "mul": lambda a, _: a[0] * a[1],
    "cast": lambda a, attrs: a[0].to(TORCH_DTYPES[attrs["dtype"]]),
    "matmul": lambda a, attrs: a[0] @ (a[1].T if attrs["transb"] else a[1]),
    "fp8_matmul": _fp8_matmul,
    "silu": lambda a, _: functional.silu(a[0]),
    "embedding": _embedding,
    "shape": lambda a, attrs: torch.tensor([a[0].shape[attrs["dim"]]]),
    "concat_shape": _concat_shape,
    "concat": lambda a, attrs: torch.cat(list(a), dim=attrs["dim"]),
    "split": lambda a, attrs: list(torch.split(a[0], attrs["sections"], dim=attrs["dim"])),
    "view": _view,
    "rms_norm": _rms_norm,
    "gather_last_token_logits": _gather_rows,
    "allreduce": lambda a, attrs: all_reduce(a[0], attrs["group"]),
    "allgather": lambda a, attrs: all_gather(a[0], attrs["group"], attrs["dim"]),
}
