"""How large the target's cache is if nobody says."""

from pathlib import Path

import pytest

from magicdec.pair import memory
from magicdec.pair.manifest import load_pair
from magicdec.pair.memory import default_kv_cache_tokens, kv_bytes_per_token
from tests.support.engines import tiny_pair


def test_half_of_the_memory_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair(tmp_path, "in_cache")
    config, target = load_pair(pair).config, pair / "target"
    per_token = kv_bytes_per_token(target, "float32")
    weights = sum((pair / role / "rank0.safetensors").stat().st_size for role in ("target", "draft"))
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * 100 * per_token)
    monkeypatch.setattr(memory, "free_gpu_memory", lambda device: {"cuda:1": weights + 2 * 300 * per_token}[device])
    assert default_kv_cache_tokens(target, config, "float32") == 100
    assert default_kv_cache_tokens(target, config, "float32", "cuda:1") == 300, "weights come off first"
    two = config.model_copy(update={"tp_size": 2})
    spared = weights - sum((pair / role / "rank0.safetensors").stat().st_size // 2 for role in ("target", "draft"))
    tokens = default_kv_cache_tokens(target, two, "float32", "cuda:1")
    assert tokens == (2 * 300 * per_token + spared) // 2 * 2 // per_token, "two GPUs hold half of a token each"
    monkeypatch.setattr(memory, "free_gpu_memory", lambda _device: 10**15)
    assert default_kv_cache_tokens(target, config, "float32", "cuda") == config.max_batch_size * config.max_seq_len


def test_too_full_a_gpu_gets_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the weights then says what is wrong."""
    pair = tiny_pair(tmp_path, "self")
    config = load_pair(pair).config
    monkeypatch.setattr(memory, "free_gpu_memory", lambda _device: 1000)
    assert default_kv_cache_tokens(pair / "target", config, "float32", "cuda") == config.block_size
