"""Manifests: what loads, and the error for everything that must not."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from magicdec.errors import EngineError
from magicdec.runtime.manifest import (
    DraftConfig,
    EngineManifest,
    FileRecord,
    PairConfig,
    PairManifest,
    check_hashes,
    hash_file,
    load_engine,
    load_pair,
)


def pair_config(**changes: Any) -> PairConfig:
    values: dict[str, Any] = {"name": "tiny", "target": "random", "draft": {"kind": "model"}, **changes}
    return PairConfig.model_validate(values)


def write_pair(directory: Path, **changes: Any) -> Path:
    data = json.loads(PairManifest(config=pair_config()).model_dump_json()) | changes
    (directory / "pair.json").write_text(json.dumps(data))
    return directory


def write_engine(directory: Path) -> Path:
    weights = directory / "rank0.safetensors"
    weights.write_bytes(b"0123456789")
    manifest = EngineManifest(
        role="target",
        source="/models/tiny",
        source_format="safetensors",
        architecture="LlamaForCausalLM",
        dtype="float32",
        tp_size=1,
        vocab_size=128,
        eos_token_ids=[2],
        trained_len=8192,
        num_parameters=1000,
        versions={"magicdec": "0.1.0"},
        files={weights.name: FileRecord(bytes=10, sha256=hash_file(weights))},
    )
    (directory / "engine.json").write_text(manifest.model_dump_json())
    return directory


def test_round_trip(tmp_path: Path) -> None:
    assert load_pair(write_pair(tmp_path)).config == pair_config()
    assert load_engine(write_engine(tmp_path)).vocab_size == 128
    check_hashes(tmp_path)


def test_missing_manifest_says_that_this_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"pair\.json is missing: this is no engine directory.*build-engine"):
        load_pair(tmp_path)


def test_wrong_format_version_is_named(tmp_path: Path) -> None:
    write_pair(tmp_path, format_version=7, new_key=1)
    with pytest.raises(EngineError, match=r"format_version is 7, and this version of magicdec reads 1"):
        load_pair(tmp_path)


@pytest.mark.parametrize("text", ["", '{"format_version": 1, "conf', "[1]", '"x"'])
def test_damaged_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pair.json").write_text(text)
    with pytest.raises(EngineError, match=r"pair\.json.*Build the pair again"):
        load_pair(tmp_path)


def test_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"pair\.json: speed: Extra inputs"):
        load_pair(write_pair(tmp_path, speed=11))


def test_truncated_weights_are_found_by_size(tmp_path: Path) -> None:
    write_engine(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes(b"0123")
    with pytest.raises(EngineError, match=r"rank0\.safetensors has 4 bytes, engine\.json says 10: it is truncated"):
        load_engine(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    write_engine(tmp_path)
    (tmp_path / "rank0.safetensors").unlink()
    with pytest.raises(EngineError, match=r"rank0\.safetensors is missing, though engine\.json lists it"):
        load_engine(tmp_path)


def test_changed_bytes_are_found_by_hash(tmp_path: Path) -> None:
    write_engine(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes(b"0123456780")
    load_engine(tmp_path)
    with pytest.raises(EngineError, match="differs from the SHA-256"):
        check_hashes(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"draft": {"kind": "model", "window_size": 100}},
            r"window_size 100 is not a multiple of block_size 16; use 112",
        ),
        ({"draft": {"kind": "model", "max_draft_len": 17}}, r"max_draft_len 17 is more than block_size 16"),
        ({"draft": {"kind": "model", "num_draft_tokens": 9}}, r"num_draft_tokens 9 is more than max_draft_len 8"),
        ({"draft": {"kind": "self", "sink_positions": "in_cache"}}, r"use 'absolute'"),
        ({"draft": {"kind": "ngram", "ngram_min": 4}}, r"ngram_min 4 is more than ngram_max 3"),
        ({"max_num_tokens": 39}, r"max_num_tokens 39 cannot hold.*use at least 40"),
        ({"block_size": 24}, "not a power of two"),
        ({"kv_cache_dtype": "fp8"}, "fp8 KV caches are not supported"),
        ({"max_batch_size": 0}, "greater than 0"),
        ({"max_batch_size": True}, "valid integer"),
        ({"speculation": "on"}, "Extra inputs"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        pair_config(**changes)


def test_sink_positions_follow_the_kind_of_draft() -> None:
    assert DraftConfig(kind="model").resolved_sink_positions == "in_cache"
    assert DraftConfig(kind="self").resolved_sink_positions == "absolute"
    assert DraftConfig(kind="model", sink_positions="absolute").resolved_sink_positions == "absolute"


def test_draft_budget_counts_sink_blocks_window_and_two_spare_blocks() -> None:
    assert pair_config().draft_budget == 16 + 512 + 32
    assert pair_config(draft={"kind": "model", "num_sink_tokens": 17, "window_size": 64}).draft_budget == 32 + 64 + 32


def test_plain_decoding_is_a_configuration() -> None:
    assert pair_config(draft={"kind": "model", "num_draft_tokens": 0}).draft.num_draft_tokens == 0
