"""How much memory an engine needs, from its manifest and configuration alone; no weights are read."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from magicdec.pair.config import ROLES, PairConfig

BYTES = {"fp8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for a batch of equal contexts."""

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target_weights + self.draft_weights + self.target_kv + self.draft_kv


def kv_bytes_per_token(model_dir: Path, dtype: str) -> int:
    """Keys and values of one token in all layers, over all tensor-parallel ranks."""
    config = json.loads((model_dir / "config.json").read_text())
    heads = max(config["num_key_value_heads"], config["mapping"]["tp_size"])
    return int(2 * config["num_hidden_layers"] * heads * config["head_size"] * BYTES[dtype])


def plan_memory(pair_dir: Path, config: PairConfig, *, context: int, batch_size: int) -> MemoryPlan:
    """What `batch_size` sequences of `context` tokens need; the draft's part does not depend on the context."""
    size = config.block_size
    tokens = -(-context // size) * size * batch_size
    draft_kv = 0
    if config.has_draft_cache:
        draft_kv = (
            config.draft_budget * batch_size * kv_bytes_per_token(pair_dir / "draft", config.kv_cache_dtype_of("draft"))
        )
    return MemoryPlan(
        target_weights=weight_bytes(pair_dir / "target"),
        draft_weights=weight_bytes(pair_dir / "draft"),
        target_kv=tokens * kv_bytes_per_token(pair_dir / "target", config.resolved_kv_cache_dtype),
        draft_kv=draft_kv,
    )


def default_kv_cache_tokens(model_dir: Path, config: PairConfig, dtype: str, device: str = "cpu") -> int:
    """max_batch_size sequences of max_seq_len, within half of what is free.

    device: where the cache will lie. On a GPU the weights of the pair are not there yet, and come off first; each rank
    holds its share of weights and cache on a GPU of its own.
    """
    wanted, per_token = config.max_batch_size * config.max_seq_len, kv_bytes_per_token(model_dir, dtype)
    if not device.startswith("cuda"):
        return min(wanted, free_memory() // 2 // per_token)
    weights = sum(weight_bytes(model_dir.parent / role) // config.tp_size_of(role) for role in ROLES)
    free = max(free_gpu_memory(device) - weights, 2 * per_token * config.block_size)
    return min(wanted, free // 2 * config.tp_size // per_token)


def free_gpu_memory(device: str) -> int:
    """Bytes that are free on a GPU; where there is none, the runner says so."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else 0


def free_memory() -> int:
    """Bytes that the machine can give to a new process without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def weight_bytes(model_dir: Path) -> int:
    """Bytes of the weights of all ranks of a target/ or draft/ folder; 0 where there is none."""
    return sum(path.stat().st_size for path in model_dir.glob("rank*.safetensors"))
