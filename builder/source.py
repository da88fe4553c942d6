"""Where weights come from: a Hugging Face directory of safetensors, or a GGUF file; read piece by piece."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from magicdec.builder.model_spec import ModelSpec, parse_config
from magicdec.errors import CheckpointError

_DTYPES = ("F32", "F16", "BF16")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_INDEX = "model.safetensors.index.json"
_AGAIN = "Copy or download the checkpoint again."


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
    raise CheckpointError(f"{path} holds no config.json: it is no Hugging Face checkpoint. {_AGAIN}")


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, by Hugging Face's names; lm_head only where it is not the embedding."""
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_size
    sizes = {"q": spec.num_heads * head, "k": spec.num_kv_heads * head, "v": spec.num_kv_heads * head}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in (f"model.layers.{index}" for index in range(spec.num_layers)):
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, size in sizes.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (size, hidden)
            if spec.has_qkv_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (size,)
        if spec.has_qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, sizes["q"])
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_shapes(spec: ModelSpec, found: Mapping[str, tuple[int, ...]], where: Path) -> dict[str, tuple[int, ...]]:
    """The expected shapes, after comparing them with what the checkpoint holds.

    CheckpointError for a missing tensor, another shape, or a tensor that the architecture does not know, since leaving
    it out would silently compute something else. rotary_emb.inv_freq (old LLaMA exports) and the lm_head of a model
    with tied embeddings are known to be redundant.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{where}: tensor {name} is missing, the checkpoint is incomplete. {_AGAIN}")
        if tuple(found[name]) != shape:
            got, want = list(found[name]), list(shape)
            raise CheckpointError(f"{where}: tensor {name} has shape {got}, the configuration calls for {want}.")
    extra = [name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    extra = [name for name in extra if not (spec.tied and name == "lm_head.weight")]
    if extra:
        raise CheckpointError(
            f"{where}: tensor {extra[0]} (of {len(extra)} such) is not part of a {spec.family} model as supported "
            "here; leaving it out would change what the model computes."
        )
    return expected


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
            raise CheckpointError(f"{self.path / self._where[name]}: cannot read {name}: {error}. {_AGAIN}") from error
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
                raise CheckpointError(f"{path} is missing, though {_INDEX} lists it. {_AGAIN}") from None
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size
                what = f"not a whole safetensors file ({size} bytes; {error})"
                raise CheckpointError(f"{path}: truncated or damaged: {what}. {_AGAIN}") from error
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
        raise CheckpointError(f"{path} is missing. {_AGAIN}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). {_AGAIN}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__} where an object is expected. {_AGAIN}")
    return data


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name, in the files' order."""
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / _INDEX} has no weight_map. {_AGAIN}")
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path / _INDEX} names the file {file!r}, which is not a plain file name.")
        return weight_map
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _names_in(files[0])
    if files:
        raise CheckpointError(f"{path} holds {len(files)} safetensors files but no {_INDEX}. {_AGAIN}")
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path}: the weights are in {pickles[0]}, a pickle, which can run any code when it is loaded and is not "
            "read here. Convert it once, where you trust it: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR), which writes safetensors."
        )
    raise CheckpointError(f"{path} holds no safetensors weights. {_AGAIN}")


def _names_in(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), file.name)
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        what = f"not a whole safetensors file ({size} bytes; {error})"
        raise CheckpointError(f"{file}: truncated or damaged: {what}. {_AGAIN}") from error


def _open_file(path: Path) -> TensorSource:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path} is a pickle, which can run any code when it is loaded and is not read here.")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: a directory or a .gguf file is needed, not a {path.suffix or 'plain'} file.")
    from magicdec.builder.gguf_source import GgufSource

    return GgufSource(path)
