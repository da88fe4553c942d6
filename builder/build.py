"""Building an engine pair: checks, conversion, manifests; into a temporary sibling that is renamed at the end."""

import glob
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from magicdec.builder.calibrate import Calibration, CalibrationText, calibrate, calibration_sequences, load_text
from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.builder.checkpoints.source import TensorSource, open_source
from magicdec.builder.config import resolve_config
from magicdec.builder.convert import write_rank
from magicdec.builder.pair import Side, check_pair, resolve_eos
from magicdec.builder.progress import OnBuildProgress
from magicdec.builder.safetensors_writer import write_error
from magicdec.builder.storage import Storage, disk_bytes
from magicdec.builder.tokenizer import TOKENIZER_FILE, stage_tokenizer
from magicdec.builder.trtllm.compile import compile_engines, require_trtllm
from magicdec.builder.trtllm.plan import EnginePlan, plan_engines
from magicdec.errors import BuildError
from magicdec.pair.config import DtypeName, PairConfig, Role
from magicdec.pair.manifest import ENGINE_FILE, PAIR_FILE, EngineManifest, FileRecord, PairManifest, hash_file

logger = logging.getLogger("magicdec.builder")
_PACKAGES = ("magicdec", "torch", "safetensors", "transformers", "gguf", "tensorrt_llm", "tensorrt")


def build_pair(
    target: Path,
    draft: Path | Literal["self", "ngram"],
    config: PairConfig,
    output: Path,
    *,
    tp_size: int | None = None,
    dtype: DtypeName | None = None,
    calibration_file: Path | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    on_progress: OnBuildProgress | None = None,
) -> Path:
    """Build the engine directory `output` for this pair and return its path.

    target, draft: checkpoint paths (see `open_source`), or "self" / "ngram", which replace the configuration's kind of
    draft. tp_size, dtype: replace the configuration's. calibration_file: text for what is quantised (see `load_text`).
    workers: processes that compile TensorRT-LLM engines (see `compile_engines`). overwrite: replace an engine directory
    that is there already. on_progress(stage, done, total): called while tokenizers are read ("tokenizer", counted),
    what is quantised is calibrated ("calibrate target", "calibrate draft", in layers), weights are converted ("convert
    target", ..., in bytes) and engines are compiled ("compile target", ..., in ranks).

    Nothing appears at `output` before everything is written; whatever goes wrong, the unfinished files are removed.
    Raises ConfigError, CheckpointError, PairError, or BuildError (disk full, output exists or cannot be written).
    """
    report = on_progress or (lambda _stage, _done, _total: None)
    config = resolve_config(config, kind=_kind(draft), dtype=dtype, tp_size=tp_size)
    output = output.absolute()
    _check_output(output, overwrite)
    if config.backend == "trtllm":
        require_trtllm()
    text = load_text(calibration_file)
    with _sources(_paths(target, draft, config)) as sources, _temporary(output, overwrite) as directory:
        sides = _stage(sources, directory, report)
        check_pair(config, sides["target"], sides.get("draft"), output)
        logger.info("the target runs on %d ranks, its draft on %d", config.tp_size, config.tp_size_of("draft"))
        plans, eos_token_ids = _plans(config, sides), {role: resolve_eos(side) for role, side in sides.items()}
        for role, source in sources.items():
            files = _write_checkpoint(role, source, config, directory / role, text, report)
            if role in plans:
                cache = output.parent / f"{output.name}.timing_cache"
                names = compile_engines(
                    directory / role, plans[role], timing_cache=cache, workers=workers, on_progress=report
                )
                files |= {name: _record(directory / role / name) for name in names}
            _write_manifest(source, sides[role], eos_token_ids[role], config, directory / role, text, files)
        _write_text(directory / PAIR_FILE, PairManifest(config=config).model_dump_json(indent=2))
    return output


def plan_pair(target: Path, draft: Path | Literal["self", "ngram"], config: PairConfig) -> dict[Role, EnginePlan]:
    """All checks, and the plans of the TensorRT-LLM engines, without building anything. Errors as `build_pair`."""
    config = resolve_config(config, kind=_kind(draft))
    with _sources(_paths(target, draft, config)) as sources, tempfile.TemporaryDirectory() as directory:
        sides = _stage(sources, Path(directory), lambda _stage, _done, _total: None)
        check_pair(config, sides["target"], sides.get("draft"), None)
        return _plans(config, sides)


def _kind(draft: Path | Literal["self", "ngram"]) -> Literal["model", "self", "ngram"]:
    return draft if draft == "self" or draft == "ngram" else "model"


def _paths(target: Path, draft: Path | Literal["self", "ngram"], config: PairConfig) -> dict[Role, Path]:
    """Checkpoints by the folder that they are built into; a self-draft with weights of its own is the target again."""
    return {role: draft if role == "draft" and isinstance(draft, Path) else target for role in config.roles}


def _plans(config: PairConfig, sides: Mapping[Role, Side]) -> dict[Role, EnginePlan]:
    """None for PyTorch, which executes the checkpoint as it is."""
    if config.backend != "trtllm":
        return {}
    return plan_engines(config, {role: _checkpoint_config(side.spec, config, role) for role, side in sides.items()})


def _checkpoint_config(spec: ModelSpec, config: PairConfig, role: Role) -> dict[str, Any]:
    storage = Storage.of(config, role)
    return spec.to_trtllm(config.dtype, config.tp_size_of(role), quant_algo=storage.quant_algo, fp8_kv=storage.fp8_kv)


@contextmanager
def _sources(paths: dict[Role, Path]) -> Iterator[dict[Role, TensorSource]]:
    sources: dict[Role, TensorSource] = {}
    try:
        for role, path in paths.items():
            sources[role] = open_source(path)
        yield sources
    finally:
        for source in sources.values():
            source.close()


@contextmanager
def _temporary(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside the output that takes its name if the block ends well, and is removed if it does not."""
    directory = output.parent / f".{output.name}.building-{os.getpid()}"
    for left in output.parent.glob(f".{glob.escape(output.name)}.building-*"):
        logger.warning("%s is left over from a build that was killed, or belongs to one that still runs", left)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise write_error(directory, error) from error
    try:
        yield directory
        _publish(directory, output, overwrite)
    except OSError as error:
        raise write_error(output, error) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _publish(directory: Path, output: Path, overwrite: bool) -> None:
    _check_output(output, overwrite)
    if not output.exists():
        directory.rename(output)
        return
    old = output.parent / f".{output.name}.replaced-{os.getpid()}"
    output.rename(old)
    try:
        directory.rename(output)
    except BaseException:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise BuildError(f"{output} is a file; give another --output.")
    if not any(output.iterdir()):
        return
    if not (output / PAIR_FILE).is_file():
        raise BuildError(f"{output} exists, and is no engine directory; give another --output.")
    if not overwrite:
        raise BuildError(f"{output} exists already; give another --output, or overwrite it with --overwrite.")


def _stage(sources: dict[Role, TensorSource], directory: Path, report: OnBuildProgress) -> dict[Role, Side]:
    """Tokenizers first: they are small, and the pair checks need them."""
    sides = {}
    for done, (role, source) in enumerate(sources.items()):
        report("tokenizer", done, len(sources))
        (directory / role).mkdir()
        sides[role] = Side(role, source.path, source.spec, stage_tokenizer(source, directory / role))
    report("tokenizer", len(sources), len(sources))
    return sides


def _write_checkpoint(
    role: Role,
    source: TensorSource,
    config: PairConfig,
    directory: Path,
    text: CalibrationText,
    report: OnBuildProgress,
) -> dict[str, FileRecord]:
    """config.json and weights, beside the tokenizer; returns the records of all files."""
    spec, tp_size, storage = source.spec, config.tp_size_of(role), Storage.of(config, role)
    fp8 = _calibrate(role, source, storage, directory, text, report)
    _write_text(directory / "config.json", json.dumps(_checkpoint_config(spec, config, role), indent=2))
    files = {path.name: _record(path) for path in directory.iterdir()}
    done, total = 0, disk_bytes(spec, tp_size, storage)

    def on_bytes(size: int) -> None:
        nonlocal done
        done += size
        report(f"convert {role}", done, total)

    report(f"convert {role}", 0, total)
    for rank in range(tp_size):
        path = directory / f"rank{rank}.safetensors"
        files[path.name] = write_rank(
            source, path, rank=rank, tp_size=tp_size, storage=storage, fp8=fp8, on_bytes=on_bytes
        )
    if fp8 is not None:
        shutil.rmtree(fp8.directory)
    return files


def _write_manifest(
    source: TensorSource,
    side: Side,
    eos_token_ids: list[int],
    config: PairConfig,
    directory: Path,
    text: CalibrationText,
    files: Mapping[str, FileRecord],
) -> None:
    spec, storage = source.spec, Storage.of(config, side.role)
    manifest = EngineManifest(
        backend=config.backend,
        role=side.role,
        source=str(source.path),
        source_format=source.format,
        architecture=spec.architecture,
        dtype=config.dtype,
        quant_algo=storage.quant_algo,
        kv_cache_quant_algo="FP8" if storage.fp8_kv else None,
        calibration=text.name if storage.needs_calibration else None,
        tp_size=config.tp_size_of(side.role),
        vocab_size=side.vocab_size,
        eos_token_ids=eos_token_ids,
        trained_len=spec.max_position_embeddings,
        num_parameters=spec.num_parameters,
        versions=_versions(),
        files=dict(sorted(files.items())),
    )
    _write_text(directory / ENGINE_FILE, manifest.model_dump_json(indent=2))


def _record(path: Path) -> FileRecord:
    return FileRecord(bytes=path.stat().st_size, sha256=hash_file(path))


def _calibrate(
    role: Role, source: TensorSource, storage: Storage, directory: Path, text: CalibrationText, report: OnBuildProgress
) -> Calibration | None:
    """The model's scales and rounded weights, in a folder beside `directory`; None where nothing is quantised."""
    if not storage.needs_calibration:
        return None
    sequences = calibration_sequences(text, directory / TOKENIZER_FILE, source.spec.vocab_size)
    scratch = directory.parent / f"{role}-rounded"
    scratch.mkdir()
    done, total = 0, source.spec.num_layers

    def on_layer() -> None:
        nonlocal done
        done += 1
        report(f"calibrate {role}", done, total)

    report(f"calibrate {role}", 0, total)
    return calibrate(source, storage, sequences, scratch, on_layer)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise write_error(path, error) from error


def _versions() -> dict[str, str]:
    """What built this engine, for bug reports; a package that is not installed is left out."""
    found = {package: _version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **{name: text for name, text in found.items() if text is not None}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
