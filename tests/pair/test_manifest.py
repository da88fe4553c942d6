"""Manifests: what loads, and the error for everything that must not."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from magicdec.errors import EngineError
from magicdec.pair.config import DraftConfig, PairConfig
from magicdec.pair.manifest import (
    EngineManifest,
    FileRecord,
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
        ({"draft": {"kind": "self", "drafter": "auto"}}, r"use num_draft_tokens .auto., or drafter .own."),
        ({"draft": {"kind": "self", "sink_positions": "in_cache"}}, r"use 'absolute'"),
        ({"draft": {"kind": "ngram", "ngram_min": 4}}, r"ngram_min 4 is more than ngram_max 3"),
        ({"max_num_tokens": 39}, r"max_num_tokens 39 cannot hold.*use at least 40"),
        ({"block_size": 24}, "not a power of two"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype 'float16' is not dtype 'bfloat16'.*use 'auto' or 'fp8'"),
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
    auto = pair_config(draft={"kind": "model", "num_draft_tokens": "auto", "drafter": "auto", "max_draft_len": 6})
    assert (auto.draft.num_draft_tokens, auto.draft.most_draft_tokens) == ("auto", 6)


A100, TRTLLM, FP8_DRAFT = {"gpu": "a100-80gb"}, {"backend": "trtllm"}, {"quantization": {"draft": "fp8"}}
INT4_DRAFT = {"quantization": {"draft": "int4"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            A100 | {"kv_cache_dtype": "fp8"},
            r"FP8 KV cache \(kv_cache_dtype: fp8\).*'a100-80gb', which has no FP8",
        ),
        (A100 | FP8_DRAFT, r"FP8 weights \(quantization\.draft: fp8\) cannot go with gpu 'a100-80gb'"),
        (A100 | {"quantization": {"target": "fp8"}}, r"FP8 weights \(quantization\.target: fp8\)"),
        (
            TRTLLM | {"kv_cache_dtype": "fp8"},
            r"kv_cache_dtype 'fp8' without quantization\.target 'fp8'.*TensorRT-LLM then turns paged context attention "
            r"off.*verified.*add quantization\.target: fp8",
        ),
        (
            TRTLLM | {"draft": {"kind": "model", "kv_cache_dtype": "fp8"}},
            r"draft\.kv_cache_dtype 'fp8' without quantization\.draft 'fp8'",
        ),
        (
            {"draft": {"kind": "self"}, **FP8_DRAFT},
            r"quantization\.draft 'fp8' differs from the target's 'none'.*kind 'self'.*leave quantization\.draft out",
        ),
        (
            {"draft": {"kind": "self"}, "quantization": {"target": "fp8", "draft": "none"}},
            r"quantization\.draft 'none' differs from the target's 'fp8'",
        ),
        (
            {"draft": {"kind": "self", "kv_cache_dtype": "bfloat16"}, "kv_cache_dtype": "fp8"},
            r"draft\.kv_cache_dtype 'bfloat16' differs from the target's 'fp8'",
        ),
        (
            {"draft": {"kind": "ngram", "kv_cache_dtype": "fp8"}},
            r"draft\.kv_cache_dtype 'fp8' differs from the target's",
        ),
        ({"quantization": {"target": "int4"}}, r"target in so few bits.*use quantization\.draft for it, and 'fp8' or"),
        ({"quantization": {"draft": "int2"}}, "Input should be 'none', 'fp8', 'int8' or 'int4'"),
        (TRTLLM | INT4_DRAFT, r"quantization\.draft 'int4' cannot go with backend 'trtllm'.*use 'fp8' for a separate"),
        (
            INT4_DRAFT | {"draft": {"kind": "self"}, "tp_size": 2},
            r"'int4' cannot be cut for 2 tensor-parallel ranks; use tp_size 1",
        ),
        (INT4_DRAFT | {"draft": {"kind": "model"}, "tp_size": 2}, r"for 2 tensor-parallel.*use draft\.tp_size: 1"),
        (
            INT4_DRAFT | {"draft": {"kind": "ngram"}},
            r"quantization\.draft 'int4' differs from the target's 'none'.*leave quantization\.draft out \[type",
        ),
        (
            {"draft": {"kind": "self"}, **FP8_DRAFT},
            r"leave quantization\.draft out, or use int8 or int4",
        ),
        (
            {"draft": {"kind": "self", "kv_cache_dtype": "fp8"}, **INT4_DRAFT},
            r"draft\.kv_cache_dtype 'fp8' differs from the target's",
        ),
        ({"quantization": {"weights": "fp8"}}, "Extra inputs"),
        ({"draft": {"kind": "model", "kv_cache_dtype": "float32"}}, r"draft\.kv_cache_dtype 'float32' is not dtype"),
    ],
)
def test_number_formats_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        pair_config(**changes)


def test_target_and_draft_have_their_own_number_formats() -> None:
    config = pair_config(quantization={"target": "fp8"}, kv_cache_dtype="fp8", gpu="h200", backend="trtllm")
    assert (config.quantization_of("target"), config.kv_cache_dtype_of("target")) == ("fp8", "fp8")
    assert (config.quantization_of("draft"), config.kv_cache_dtype_of("draft")) == ("none", "bfloat16")
    drafts = pair_config(quantization={"draft": "fp8"}, draft={"kind": "model", "kv_cache_dtype": "fp8"})
    assert (drafts.quantization_of("draft"), drafts.kv_cache_dtype_of("draft")) == ("fp8", "fp8")
    assert (drafts.quantization_of("target"), drafts.kv_cache_dtype_of("target")) == ("none", "bfloat16")


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_self_speculation_drafts_in_the_targets_formats(kv: str) -> None:
    formats = {"quantization": {"target": "fp8", "draft": "fp8"}, "kv_cache_dtype": "fp8"}
    config = pair_config(draft={"kind": "self", "kv_cache_dtype": kv}, **formats)
    assert (config.quantization_of("draft"), config.kv_cache_dtype_of("draft")) == ("fp8", "fp8")


@pytest.mark.parametrize("kind", ["self", "model"])
def test_a_draft_in_int4_has_weights_of_its_own_and_in_self_speculation_no_cache(kind: str) -> None:
    config = pair_config(draft={"kind": kind}, quantization={"draft": "int4"}, kv_cache_dtype="fp8")
    assert config.roles == ("target", "draft")
    assert (config.quantization_of("target"), config.quantization_of("draft")) == ("none", "int4")
    assert config.has_draft_cache == (kind == "model")
    assert config.kv_cache_dtype_of("draft") == ("fp8" if kind == "self" else "bfloat16")


@pytest.mark.parametrize("quantization", [{}, {"target": "fp8"}, {"target": "fp8", "draft": "fp8"}])
def test_a_self_draft_in_the_targets_format_is_the_target(quantization: dict[str, str]) -> None:
    assert pair_config(draft={"kind": "self"}, quantization=quantization).roles == ("target",)


def test_the_torch_backend_takes_an_fp8_cache_without_fp8_weights() -> None:
    assert pair_config(kv_cache_dtype="fp8", gpu="h100-80gb").resolved_kv_cache_dtype == "fp8"
