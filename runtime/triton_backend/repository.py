"""Writing a model repository that Triton serves."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from magicdec.errors import ConfigError
from magicdec.pair.manifest import load_pair
from magicdec.runtime.triton_backend.llm import tensors as llm_tensors
from magicdec.runtime.triton_backend.parameters import LLMParameters
from magicdec.runtime.triton_backend.tensor_spec import TensorSpec, block
from magicdec.runtime.triton_backend.text import tensors as text_tensors

MODELS: Final = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls")
_IMPORTS: Final = {
    "tensorrt_llm": ("llm_model", "LLMModel"),
    "preprocessing": ("text_models", "PreprocessingModel"),
    "postprocessing": ("text_models", "PostprocessingModel"),
    "tensorrt_llm_bls": ("bls_model", "BLSModel"),
}
_MODEL_PY: Final = '''"""Written by `magicdec triton-repo`; the model is in the magicdec package."""

from magicdec.threads import wait_politely

wait_politely()  # before torch is imported

from magicdec.runtime.triton_backend.{module} import {name} as TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''


def write_repository(
    directory: Path,
    parameters: LLMParameters,
    *,
    decoupled: bool = True,
    max_batch_size: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write all models into `directory`.

    decoupled: many responses a request, which streaming needs. max_batch_size: rows of one request; by default what
    the engine runs at a time.

    Raises:
        ConfigError: the directory holds something else, or models already and not `overwrite`.
        EngineError: there is no engine.
    """
    engine = parameters.engine_dir.resolve()
    size = load_pair(engine).config.max_batch_size if max_batch_size is None else max_batch_size
    if size < 1:
        raise ConfigError(f"max_batch_size is {size}; give 1 or more")
    _clear(directory, overwrite=overwrite)
    tokenizer = {"tokenizer_dir": str(engine / "target")}
    configs = {
        "tensorrt_llm": _config(
            "tensorrt_llm",
            size,
            llm_tensors.INPUTS,
            llm_tensors.OUTPUTS,
            parameters.texts() | {"gpt_model_path": str(engine)},
            decoupled=decoupled,
        ),
        "preprocessing": _config(
            "preprocessing", size, text_tensors.PREPROCESSING_INPUTS, text_tensors.PREPROCESSING_OUTPUTS, tokenizer
        ),
        "postprocessing": _config(
            "postprocessing", size, text_tensors.POSTPROCESSING_INPUTS, text_tensors.POSTPROCESSING_OUTPUTS, tokenizer
        ),
        "ensemble": _ensemble(size),
        "tensorrt_llm_bls": _config(
            "tensorrt_llm_bls",
            size,
            [*text_tensors.TEXT_INPUTS, *text_tensors.IMAGE_INPUTS],
            text_tensors.TEXT_OUTPUTS,
            {},
            decoupled=decoupled,
        ),
    }
    for name, config in configs.items():
        version = directory / name / "1"
        version.mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)
        if name in _IMPORTS:
            module, kind = _IMPORTS[name]
            (version / "model.py").write_text(_MODEL_PY.format(module=module, name=kind))


def _clear(directory: Path, *, overwrite: bool) -> None:
    """Only what a repository of ours holds is ever removed."""
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    strangers = sorted(held - set(MODELS))
    if strangers:
        raise ConfigError(f"{directory} holds {', '.join(strangers)}; give a new or empty directory")
    if held and not overwrite:
        raise ConfigError(f"{directory} holds models; give another directory, or replace them with --overwrite")
    for name in held:
        shutil.rmtree(directory / name)


def _config(
    name: str,
    max_batch_size: int,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parameters: Mapping[str, str],
    *,
    decoupled: bool = False,
) -> str:
    """config.pbtxt of a model in Python; one instance, which takes any number of requests at a time."""
    head = f'name: "{name}"\nbackend: "python"\nmax_batch_size: {max_batch_size}\n'
    if decoupled:
        head += "model_transaction_policy { decoupled: true }\n"
    parts = [head, block("input", inputs), block("output", outputs), "instance_group [ { count: 1, kind: KIND_CPU } ]"]
    for key, text in parameters.items():
        parts.append(f'parameters {{ key: "{key}" value {{ string_value: {_quoted(text)} }} }}')
    return "\n".join(parts) + "\n"


def _ensemble(max_batch_size: int) -> str:
    """config.pbtxt of the ensemble of `preprocessing` and `tensorrt_llm`."""
    inner = {name: f"_{name}" for name in text_tensors.FROM_PREPROCESSING.values()}
    to_llm = {to: inner[name] for to, name in text_tensors.FROM_PREPROCESSING.items()} | text_tensors.TO_LLM
    steps = [
        _step("preprocessing", text_tensors.TO_PREPROCESSING, inner),
        _step("tensorrt_llm", to_llm, text_tensors.FROM_LLM),
    ]
    return "\n".join(
        [
            f'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: {max_batch_size}',
            block("input", text_tensors.TEXT_INPUTS),
            block("output", text_tensors.TEXT_OUTPUTS),
            "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n",
        ]
    )


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    maps = [("input_map", inputs), ("output_map", outputs)]
    lines = [f'      {kind} {{ key: "{key}" value: "{value}" }}' for kind, each in maps for key, value in each.items()]
    return "\n".join(["    {", f'      model_name: "{model}"', "      model_version: -1", *lines, "    }"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
