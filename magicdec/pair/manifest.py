"""The manifests of an engine directory: what the builder writes and the runtime reads."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from magicdec.errors import EngineError
from magicdec.pair.config import (
    BackendName,
    DtypeName,
    Frozen,
    PairConfig,
    Role,
)

FORMAT_VERSION: Final = 1
PAIR_FILE: Final = "pair.json"
ENGINE_FILE: Final = "engine.json"
REBUILD: Final = "Build the pair again with build-engine."


class FileRecord(Frozen):
    """Size in bytes and SHA-256 (hex) of one file of an engine directory."""

    bytes: int = Field(ge=0)
    sha256: str = Field(min_length=64, max_length=64)


class EngineManifest(Frozen):
    """engine.json, one in target/ and one in draft/: what was built, from what, and the files it consists of.

    source: the path given to the builder. vocab_size: usable token ids, 1 + the tokenizer's highest id (the model may
    have more, padded rows). trained_len: max_position_embeddings. versions: package -> version that built it.
    quant_algo, kv_cache_quant_algo: TensorRT-LLM's names of how linear layers and KV are stored, None = in `dtype`.
    calibration: the text that FP8 scales, or rounded weights, were made from.
    """

    format_version: Literal[1] = FORMAT_VERSION
    backend: BackendName = "torch"
    role: Role
    source: str
    source_format: Literal["safetensors", "gguf"]
    architecture: str
    dtype: DtypeName
    quant_algo: Literal["FP8", "W8A16", "W4A16"] | None = None
    kv_cache_quant_algo: Literal["FP8"] | None = None
    calibration: str | None = None
    tp_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    eos_token_ids: list[int]
    trained_len: int = Field(gt=0)
    num_parameters: int = Field(gt=0)
    versions: dict[str, str]
    files: dict[str, FileRecord]


class PairManifest(Frozen):
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
