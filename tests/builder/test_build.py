"""Building: what stands there afterwards, and that nothing that loads is left when it goes wrong."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from magicdec.builder import safetensors_writer
from magicdec.builder.build import build_pair
from magicdec.errors import BuildError, CheckpointError, EngineError
from magicdec.pair.manifest import check_hashes, load_engine, load_pair
from tests.builder.engines import tiny_config
from tests.support.tiny_models import write_tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "hf")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_directory_of_a_pair_with_a_draft_model(tmp_path: Path, checkpoint: Path) -> None:
    draft = write_tiny_checkpoint(tmp_path / "draft-hf", "qwen3", tied=True)
    output = build_pair(checkpoint, draft, tiny_config(), tmp_path / "deep" / "engine", tp_size=2)
    files = ["config.json", "engine.json", "generation_config.json", "rank0.safetensors", "rank1.safetensors"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    assert names(output) == ["draft", "pair.json", "target"]
    assert names(output / "target") == names(output / "draft") == files
    assert names(output.parent) == ["engine"]
    config = load_pair(output).config
    assert (config.draft.kind, config.tp_size, config.dtype) == ("model", 2, "float32")
    manifest = load_engine(output / "draft")
    assert (manifest.role, manifest.architecture, manifest.eos_token_ids) == ("draft", "Qwen2ForCausalLM", [2])
    assert (manifest.source, manifest.source_format) == (str(draft), "safetensors")
    assert manifest.trained_len == 8192
    assert {"magicdec", "torch", "python"} <= set(manifest.versions)
    check_hashes(output / "target")


@pytest.mark.parametrize("kind", ["self", "ngram"])
def test_no_draft_folder_without_a_draft_model(tmp_path: Path, checkpoint: Path, kind: Any) -> None:
    output = build_pair(checkpoint, kind, tiny_config(draft={"kind": "model", "window_size": 64}), tmp_path / "engine")
    assert names(output) == ["pair.json", "target"]
    assert load_pair(output).config.draft.kind == kind


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path, checkpoint: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    output = build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine", on_progress=on_progress)
    assert list(seen) == ["tokenizer", "convert target"]
    done = [pair[0] for pair in seen["convert target"]]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == seen["convert target"][0][1]
    assert 0 < (output / "target/rank0.safetensors").stat().st_size - done[-1] < 10_000  # the header


def test_existing_engine_is_kept_unless_told_otherwise(tmp_path: Path, checkpoint: Path) -> None:
    output = build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    with pytest.raises(BuildError, match="engine exists already; give another --output, or overwrite"):
        build_pair(checkpoint, "ngram", tiny_config(), output)
    assert load_pair(output).config.draft.kind == "self"
    build_pair(checkpoint, "ngram", tiny_config(), output, overwrite=True)
    assert load_pair(output).config.draft.kind == "ngram"
    assert names(tmp_path) == ["engine", "hf"]


def test_failed_overwrite_keeps_the_old_engine(tmp_path: Path, checkpoint: Path) -> None:
    output = build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        build_pair(checkpoint, "ngram", tiny_config(), output, overwrite=True)
    assert load_pair(output).config.draft.kind == "self"
    check_hashes(output / "target")


def test_what_is_no_engine_is_never_overwritten(tmp_path: Path, checkpoint: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    build_pair(checkpoint, "self", tiny_config(), precious)  # an empty folder is as good as none
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(BuildError, match="other exists, and is no engine directory"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "other", overwrite=True)
    with pytest.raises(BuildError, match="is a file"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "other" / "letter.txt", overwrite=True)
    assert (tmp_path / "other" / "letter.txt").read_text() == "dear"


def full_disk_after(size: int) -> Callable[[BinaryIO, memoryview], None]:
    left = size

    def write(file: BinaryIO, data: memoryview) -> None:
        nonlocal left
        left -= data.nbytes
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(data)

    return write


@pytest.mark.parametrize("size", [0, 2000, 60_000])
def test_full_disk_is_told_and_cleaned_up(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(safetensors_writer, "write_bytes", full_disk_after(size))
    with pytest.raises(BuildError, match=r"The disk is full: .*rank0\.safetensors.*Free some space"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    assert names(tmp_path) == ["hf"]


def test_full_disk_while_small_files_are_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(_path: Path, *_args: Any, **_kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(BuildError, match="The disk is full"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    assert names(tmp_path) == ["hf"]


def test_output_that_cannot_be_made_is_told(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="could not be written"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "file" / "engine")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_build_leaves_nothing_and_shows_nothing_before_its_end(
    tmp_path: Path, checkpoint: Path, error: type[BaseException]
) -> None:
    calls = 0

    def on_progress(stage: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert not (tmp_path / "engine").exists()
        (unfinished,) = tmp_path.glob(".engine.building-*")
        with pytest.raises(EngineError):
            load_pair(unfinished)
        if stage.startswith("convert") and done == total:
            raise error

    with pytest.raises(error):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine", on_progress=on_progress)
    assert calls > 10
    assert names(tmp_path) == ["hf"]


def test_left_over_of_a_killed_build_is_told_and_does_no_harm(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".engine.building-1").mkdir()
    build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    assert ".engine.building-1 is left over from a build that was killed" in caplog.text


def test_missing_tokenizer_is_told_with_the_way_to_make_one(tmp_path: Path, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json is missing.*AutoTokenizer\.from_pretrained\(.*save_pretrained"
    ):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    assert names(tmp_path) == ["hf"]


@pytest.mark.parametrize("text", ["", "{", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_damaged_tokenizer_is_told(tmp_path: Path, checkpoint: Path, text: str) -> None:
    (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json (cannot be read|has no tokens)"):
        build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")


def test_end_token_of_the_tokenizer_counts_where_no_configuration_names_one(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", eos_token_id=None)
    (checkpoint / "generation_config.json").unlink()
    output = build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine")
    assert load_engine(output / "target").eos_token_ids == [2]
    settings = checkpoint / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": {"content": "<s>"}}))
    output = build_pair(checkpoint, "self", tiny_config(), tmp_path / "engine", overwrite=True)
    assert load_engine(output / "target").eos_token_ids == [1]
