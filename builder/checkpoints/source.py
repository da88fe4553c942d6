"""Where weights come from: a Hugging Face directory of safetensors, or a GGUF file; read piece by piece."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from magicdec.builder.checkpoints.model_spec import ModelSpec, parse_config
from magicdec.builder.checkpoints.shapes import AGAIN, check_shapes
from magicdec.errors import CheckpointError

_DTYPES = ("F32", "F16", "BF16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = "model.safetensors.index.json"


class TensorSource(Protocol):
    """Tensors by Hugging Face's names. A tensor has one or two dimensions; the first is called rows.

    shapes holds exactly the tensors that the spec calls for. `read` returns rows [start, stop) and, of a matrix, all
    columns or [column_start, column_stop), as float32, float16 or bfloat16, without loading more of the file.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    spec: ModelSpec
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor: ...

    def close(self) -> None: ...


def open_source(path: Path) -> TensorSource:
    """Open a checkpoint: a directory with config.json and safetensors, a .gguf file, or a directory with one of those.

    CheckpointError names what is missing, damaged or not supported, with the mend.
    """
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. A local directory or a .gguf file is needed; download the model first."
        )
    if path.is_file():
        return _open_file(path)
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return SafetensorsSource(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_file(ggufs[0])
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files ({names}): give the path of the one to build.")
    raise CheckpointError(f"{path} holds no config.json: it is no Hugging Face checkpoint. {AGAIN}")


class SafetensorsSource:
    """A Hugging Face directory: config.json and model.safetensors, or shards with their index. Never reads pickle."""

    format: Literal["safetensors", "gguf"] = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where = _weight_map(path)
        try:
            found = {name: self._shape(name, file) for name, file in self._where.items()}
            config = read_json(path / "config.json")
            generation = path / "generation_config.json"
            eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
            if eos is not None:
                config["eos_token_id"] = eos
            self.spec = parse_config(config, str(path / "config.json"), has_lm_head="lm_head.weight" in found)
            self.shapes: Mapping[str, tuple[int, ...]] = check_shapes(self.spec, found, path)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        try:
            piece = self._file(self._where[name]).get_slice(name)
            tensor = piece[slice(*rows)] if columns is None else piece[slice(*rows), slice(*columns)]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / self._where[name]}: cannot read {name}: {error}. {AGAIN}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self.path / name
            try:
                self._files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing, though {_INDEX} lists it. {AGAIN}") from None
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size
                what = f"not a whole safetensors file ({size} bytes; {error})"
                raise CheckpointError(f"{path}: truncated or damaged: {what}. {AGAIN}") from error
        return self._files[name]

    def _shape(self, name: str, file: str) -> tuple[int, ...]:
        handle = self._file(file)
        try:
            piece = handle.get_slice(name)
        except SafetensorError:
            raise CheckpointError(f"{self.path / file} does not hold {name}, though {_INDEX} says so.") from None
        if piece.get_dtype() not in _DTYPES and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{self.path / file}: tensor {name} is of dtype {piece.get_dtype()}; float32, float16 and bfloat16 "
                "are supported. Give the unquantised checkpoint."
            )
        return tuple(piece.get_shape())


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of a checkpoint; CheckpointError if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {AGAIN}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). {AGAIN}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__} where an object is expected. {AGAIN}")
    return data


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, in the files' order."""
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / _INDEX} has no weight_map. {AGAIN}")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path / _INDEX} names the file {file!r}, which is not a plain file name.")
        return weight_map
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _names_in(files[0])
    if files:
        raise CheckpointError(f"{path} holds {len(files)} safetensors files but no {_INDEX}. {AGAIN}")
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path}: the weights are in {pickles[0]}, a pickle, which can run any code when it is loaded and is not "
            "read here. Convert it once, where you trust it: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR), which writes safetensors."
        )
    raise CheckpointError(f"{path} holds no safetensors weights. {AGAIN}")


def _names_in(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), file.name)
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        what = f"not a whole safetensors file ({size} bytes; {error})"
        raise CheckpointError(f"{file}: truncated or damaged: {what}. {AGAIN}") from error


def _open_file(path: Path) -> TensorSource:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which can run any code when it is loaded and is not read here.")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: a directory or a .gguf file is needed, not a {path.suffix or 'plain'} file.")
    from magicdec.builder.checkpoints.gguf_source import GgufSource

    return GgufSource(path)
