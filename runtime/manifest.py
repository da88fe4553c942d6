"""What the builder writes and the runtime reads: the pair's configuration and the manifests of an engine directory.

Builder and runtime share nothing else. Every model here is frozen and refuses unknown keys, so a misspelt key is an
error and never a silently used default.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from magicdec.errors import EngineError
from magicdec.runtime.cyclic_cache import num_cyclic_blocks

FORMAT_VERSION: Final = 1
PAIR_FILE: Final = "pair.json"
ENGINE_FILE: Final = "engine.json"
REBUILD: Final = "Build the pair again with build-engine."

DraftKind = Literal["model", "self", "ngram"]
SinkPositions = Literal["in_cache", "absolute"]
DtypeName = Literal["bfloat16", "float16", "float32"]
GpuName = Literal["a100-80gb", "h100-80gb"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DraftConfig(_Frozen):
    """How drafts are made. Lengths are in tokens.

    kind: "model" (a separate draft model), "self" (the target over a bounded block table), "ngram" (prompt lookup).
    window_size: recent tokens the draft always sees; num_sink_tokens: first tokens it keeps (rounded up to blocks).
    max_draft_len: the most draft tokens a step may ever propose; num_draft_tokens: how many it proposes by default,
    0 = plain decoding. sink_positions: see `resolved_sink_positions`. ngram_min, ngram_max: sizes for prompt lookup.
    """

    kind: DraftKind
    window_size: int = Field(default=512, gt=0)
    num_sink_tokens: int = Field(default=4, gt=0)
    max_draft_len: int = Field(default=8, gt=0)
    num_draft_tokens: int = Field(default=4, ge=0)
    sink_positions: SinkPositions | None = None
    ngram_min: int = Field(default=1, gt=0)
    ngram_max: int = Field(default=3, gt=0)

    @property
    def resolved_sink_positions(self) -> SinkPositions:
        """Where sink keys stand: a draft model's follow its window, in self-speculation they are the target's own."""
        if self.sink_positions is not None:
            return self.sink_positions
        return "absolute" if self.kind == "self" else "in_cache"

    @model_validator(mode="after")
    def _check(self) -> "DraftConfig":
        if self.num_draft_tokens > self.max_draft_len:
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens} is more than max_draft_len {self.max_draft_len}; "
                "lower the one or raise the other"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is more than ngram_max {self.ngram_max}; swap them")
        if self.kind == "self" and self.sink_positions == "in_cache":
            raise ValueError(
                "sink_positions 'in_cache' cannot go with kind 'self', whose sink blocks are the target's own; "
                "use 'absolute' or leave the key out"
            )
        return self


class PairConfig(_Frozen):
    """One target with one way to draft for it; a file in configs/ is one of these.

    target, draft_model: which checkpoints the numbers are for (Hugging Face id or path; informational).
    kv_cache_dtype: "auto" is `dtype`. gpu: the GPU whose memory the build is checked against.
    max_num_tokens: token budget of one packed target pass. beyond_trained_len: allow a max_seq_len past the trained
    length, which is useful for timing only, since answers degrade there.
    """

    name: str = Field(min_length=1)
    target: str = Field(min_length=1)
    draft_model: str | None = None
    draft: DraftConfig
    dtype: DtypeName = "bfloat16"
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    gpu: GpuName | None = None
    block_size: int = Field(default=16, gt=0)
    max_batch_size: int = Field(default=8, gt=0)
    max_seq_len: int = Field(default=8192, gt=0)
    max_num_tokens: int = Field(default=2048, gt=0)
    tp_size: int = Field(default=1, gt=0)
    beyond_trained_len: bool = False

    @property
    def resolved_kv_cache_dtype(self) -> DtypeName:
        """The dtype of keys and values in the cache."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def draft_budget(self) -> int:
        """Tokens of KV that a separate draft model holds for each sequence: sink blocks, window, two spare blocks."""
        draft, size = self.draft, self.block_size
        return num_cyclic_blocks(draft.num_sink_tokens, draft.window_size, size, draft.max_draft_len) * size

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _refuse_fp8(cls, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("fp8"):
            raise ValueError("fp8 KV caches are not supported by the torch backend; use 'auto' or 'bfloat16'")
        return value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two; use 16 or 32")
        return value

    @model_validator(mode="after")
    def _check(self) -> "PairConfig":
        draft, block = self.draft, self.block_size
        if draft.window_size % block:
            raise ValueError(
                f"draft.window_size {draft.window_size} is not a multiple of block_size {block}; "
                f"use {-(-draft.window_size // block) * block}"
            )
        if draft.max_draft_len > block:
            raise ValueError(
                f"draft.max_draft_len {draft.max_draft_len} is more than block_size {block}: a rewind could reach a "
                f"block already overwritten; use at most {block} or larger blocks"
            )
        need = self.max_batch_size * (draft.num_draft_tokens + 1)
        if self.max_num_tokens < need:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} cannot hold one verification of max_batch_size "
                f"{self.max_batch_size} requests with {draft.num_draft_tokens} draft tokens each; use at least {need}"
            )
        return self


class FileRecord(_Frozen):
    """Size in bytes and SHA-256 (hex) of one file of an engine directory."""

    bytes: int = Field(ge=0)
    sha256: str = Field(min_length=64, max_length=64)


class EngineManifest(_Frozen):
    """engine.json, one in target/ and one in draft/: what was built, from what, and the files it consists of.

    source: the path given to the builder. vocab_size: usable token ids, 1 + the tokenizer's highest id (the model may
    have more, padded rows). trained_len: max_position_embeddings. versions: package -> version that built it.
    """

    format_version: Literal[1] = FORMAT_VERSION
    backend: Literal["torch"] = "torch"
    role: Literal["target", "draft"]
    source: str
    source_format: Literal["safetensors", "gguf"]
    architecture: str
    dtype: DtypeName
    tp_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    eos_token_ids: list[int]
    trained_len: int = Field(gt=0)
    num_parameters: int = Field(gt=0)
    versions: dict[str, str]
    files: dict[str, FileRecord]


class PairManifest(_Frozen):
    """pair.json: the configuration as built, with draft.kind, dtype and tp_size resolved."""

    format_version: Literal[1] = FORMAT_VERSION
    config: PairConfig


_M = TypeVar("_M", PairManifest, EngineManifest)


def load_pair(directory: Path) -> PairManifest:
    """Read DIR/pair.json; EngineError says what is wrong with the directory and the mend."""
    return _load(PairManifest, directory / PAIR_FILE)


def load_engine(directory: Path) -> EngineManifest:
    """Read engine.json of a target/ or draft/ folder; EngineError also where a file's size is not as recorded."""
    manifest = _load(EngineManifest, directory / ENGINE_FILE)
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise EngineError(f"{path} is missing, though {ENGINE_FILE} lists it. {REBUILD}")
        size = path.stat().st_size
        if size != record.bytes:
            what = "truncated" if size < record.bytes else "changed"
            raise EngineError(f"{path} has {size} bytes, {ENGINE_FILE} says {record.bytes}: it is {what}. {REBUILD}")
    return manifest


def check_hashes(directory: Path) -> None:
    """Compare every file of a target/ or draft/ folder with its SHA-256 in engine.json; EngineError if one differs."""
    for name, record in load_engine(directory).files.items():
        if hash_file(directory / name) != record.sha256:
            raise EngineError(f"{directory / name} differs from the SHA-256 in {ENGINE_FILE}: it is damaged. {REBUILD}")


def hash_file(path: Path) -> str:
    """SHA-256 of a file as hex, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _load(model: type[_M], path: Path) -> _M:
    data = _read_json(path)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise EngineError(
            f"{path}: format_version is {version!r}, and this version of magicdec reads {FORMAT_VERSION}. {REBUILD}"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise EngineError(f"{path}: {where}: {first['msg']} (got {first['input']!r:.200}). {REBUILD}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "this is no engine directory, or its build did not finish"
        raise EngineError(f"{path} is missing: {what}. {REBUILD}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be read: {error}. {REBUILD}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineError(f"{path} is not JSON ({error}): it is truncated or was edited. {REBUILD}") from error
    if not isinstance(data, dict):
        raise EngineError(f"{path} holds a JSON {type(data).__name__} where an object is expected. {REBUILD}")
    return data
