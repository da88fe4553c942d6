"""Building tiny engines for the builder's tests, and joining the rank files of one back into one model."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from magicdec.builder.build import build_pair
from magicdec.pair.config import PairConfig


def tiny_config(**changes: Any) -> PairConfig:
    values: dict[str, Any] = {
        "name": "tiny",
        "target": "random",
        "draft": {"kind": "self", "window_size": 64},
        "dtype": "float32",
        "max_seq_len": 1024,
    }
    return PairConfig.model_validate(values | changes)


def build_target(checkpoint: Path, output: Path, **options: Any) -> Path:
    """Build a self-speculating pair and return its target/ folder."""
    return build_pair(checkpoint, "self", tiny_config(), output, **options) / "target"


def rejoin(directory: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks as one rank would hold them, by what the format says about each kind of tensor.

    config: the folder's config.json. FP8 tensors come as int8.
    """
    tp = config["mapping"]["tp_size"]
    ranks = [load_file(directory / f"rank{rank}.safetensors") for rank in range(tp)]
    return {name: _join(name, [_as_bytes(rank[name]) for rank in ranks], config) for name in ranks[0]}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 as int8, with which PyTorch can do everything."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _join(name: str, parts: list[torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    if "attention.qkv" in name and not name.endswith("_scaling_factor"):
        return _join_qkv(parts, config)
    if name.endswith(("attention.dense.weight", "mlp.proj.weight")):
        return torch.cat(parts, dim=1)
    if name.endswith(("mlp.fc.weight", "mlp.gate.weight", "mlp.fc.bias", "mlp.gate.bias")):
        return torch.cat(parts)
    if name == "lm_head.weight":
        whole = torch.cat(parts)
        assert not whole[config["vocab_size"] :].any(), "the padding of lm_head is not zero"
        return whole[: config["vocab_size"]]
    assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
    return parts[0]


def _join_qkv(parts: list[torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    tp, head, kv_heads = len(parts), config["head_size"], config["num_key_value_heads"]
    local_q = config["num_attention_heads"] // tp * head
    local_kv = max(kv_heads // tp, 1) * head
    queries, keys, values = zip(*(torch.split(part, [local_q, local_kv, local_kv]) for part in parts), strict=True)
    copies = max(tp // kv_heads, 1)
    for group in (keys, values):
        assert all(torch.equal(group[rank], group[rank // copies * copies]) for rank in range(tp))
    return torch.cat([*queries, *keys[::copies], *values[::copies]])
