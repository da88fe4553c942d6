"""Scales and rounded weights of a model, from one pass over text with observers on its linear layers and its cache.

The pass is that of `plugins.model.torch_model`, with which the runtime executes checkpoints: a second implementation of
the same model could only differ from it. Layers are read one at a time, so memory holds one layer and the text's
activations, whatever the model's size. (NVIDIA's ModelOpt
makes the same kind of scales, but needs the model whole, as a Hugging Face module.)

E4M3's error is relative to the number, so numbers that are large and nearly constant are stored worst and say least.
The mean is therefore subtracted from the inputs of qkv, fc and gate before rounding, and their biases make up for it.
Keys, where a few channels are such, are stored turned (`plugins.hadamard`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from magicdec.builder.checkpoints.source import TensorSource
from magicdec.builder.convert import read_tensor
from magicdec.builder.observers import WatchedCache, fp8_scale, watch
from magicdec.builder.shard import OutputTensor, plan_rank
from magicdec.builder.storage import KV_SCALE, TABLES, Storage, stored_tensors, weight_only_tensors
from magicdec.errors import BuildError, CheckpointError, ConfigError
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.plugins.model.torch_model import Layer, ModelConfig, TorchModel
from magicdec.plugins.weight_only import int8_scales, to_int8

# Static scales saturate what is larger than anything in these tokens.
CALIBRATION_TOKENS = 8192
SEQUENCE_TOKENS = 512
_MIN_TOKENS = 256
_NOT_FINITE = "the model computes NaN or infinity on the calibration text."
DEFAULT_TEXT = "pydoc_data.topics (the Python language reference)"


@dataclass(frozen=True)
class CalibrationText:
    """Text to calibrate on, and what to call it in manifests and errors."""

    name: str
    text: str


def load_text(path: Path | None) -> CalibrationText:
    """A UTF-8 file, or by default the topics that `help()` shows, which every Python carries."""
    if path is None:
        from pydoc_data.topics import topics

        return CalibrationText(DEFAULT_TEXT, "\n\n".join(topics[name].strip() for name in sorted(topics)))
    try:
        return CalibrationText(str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 text to calibrate on: {error}. Give another file."
        ) from error


def calibration_sequences(text: CalibrationText, tokenizer_file: Path, vocab_size: int) -> list[list[int]]:
    """The first CALIBRATION_TOKENS of the text as sequences, each with what the tokenizer puts before a prompt.

    ConfigError if the text is too short for scales that one could trust.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    prefix = tokenizer.encode("").ids[:1]
    ids = [token for token in tokenizer.encode(text.text, add_special_tokens=False).ids if token < vocab_size]
    if len(ids) < _MIN_TOKENS:
        raise ConfigError(
            f"{text.name} has {len(ids)} tokens, and calibration needs at least {_MIN_TOKENS} (it reads "
            f"{CALIBRATION_TOKENS}); give a longer text"
        )
    size = SEQUENCE_TOKENS - len(prefix)
    return [prefix + ids[start : start + size] for start in range(0, min(len(ids), CALIBRATION_TOKENS), size)]


@dataclass(frozen=True)
class Calibration:
    """Scales by their names in a checkpoint; rounded weights and what belongs to them by the source's names."""

    scales: dict[str, float]
    directory: Path
    files: dict[str, str]

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> torch.Tensor:
        """Rows, and columns if not all, of a matrix as it was rounded, or of what belongs to it."""
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            piece = file.get_slice(name)
            out = piece[rows[0] : rows[1]] if columns is None else piece[rows[0] : rows[1], columns[0] : columns[1]]
        assert isinstance(out, torch.Tensor)
        return out


@torch.inference_mode()
def calibrate(
    source: TensorSource,
    storage: Storage,
    sequences: Sequence[Sequence[int]],
    scratch: Path,
    on_layer: Callable[[], None],
) -> Calibration:
    """The scales that `storage` calls for, and rounded weights, written to the folder `scratch` layer by layer.

    An FP8 scale is the largest magnitude over 448. fc and gate share one for their weights, so that kernels which join
    them can take both as they are. The pass computes in float32. on_layer is called after each layer.
    """
    config = ModelConfig.from_checkpoint(source.spec.to_trtllm("float32", 1))
    found = Calibration({}, scratch, {})
    tensors = {tensor.name: tensor for tensor in plan_rank(source.spec, 0, 1)}
    results = {t.name: t.data for t in stored_tensors(source.spec, 0, 1, storage) if t.data is not None}

    def layers() -> Iterator[Layer]:
        for index in range(config.num_layers):
            prefix = f"transformer.layers.{index}."
            mine = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            weights = {name: read_tensor(source, tensor, torch.float32) for name, tensor in mine.items()}
            layer = Layer.from_checkpoint(weights, index)
            watches = watch(layer, storage)
            yield watches.layer if watches is not None else layer
            if watches is not None:
                if not watches.all_finite:
                    raise CheckpointError(f"{source.path}: {_NOT_FINITE}")
                scales, rounded = watches.quantise(storage.weight_only)
                found.scales.update({prefix + name: scale for name, scale in scales.items()})
                _save(found, f"layer{index}.safetensors", {results[prefix + n]: w for n, w in rounded.items()})
            on_layer()

    names = ("transformer.vocab_embedding.weight", "transformer.ln_f.weight")
    weights = {name: read_tensor(source, tensors[name], torch.float32) for name in names}
    model = TorchModel(replace(config, num_layers=0), weights | {"lm_head.weight": torch.empty(0, config.hidden_size)})
    model.layers = layers()
    cache = WatchedCache(config, num_slots=len(sequences) * SEQUENCE_TOKENS)
    model.forward(pack([_sequence(*entry) for entry in enumerate(sequences)]), cache, SEQUENCE_TOKENS)
    if storage.weight_only is not None:
        _save_tables(found, source, tensors)
    if storage.fp8_kv:
        for index, largest in enumerate(cache.largest):
            found.scales[f"transformer.layers.{index}.attention.{KV_SCALE}"] = fp8_scale(largest)
    if not all(math.isfinite(scale) for scale in found.scales.values()):
        raise CheckpointError(f"{source.path}: {_NOT_FINITE}")
    return found


def _save(found: Calibration, file: str, rounded: dict[OutputTensor, torch.Tensor]) -> None:
    """Write a layer's tensors by the source's names, from which each rank takes its rows and columns."""
    parts = {}
    for tensor, matrix in rounded.items():
        sizes = [piece.rows[1] - piece.rows[0] for piece in tensor.pieces]
        for piece, part in zip(tensor.pieces, torch.split(matrix, sizes), strict=True):
            assert piece.source is not None
            parts[piece.source] = part.contiguous()
    try:
        save_file(parts, found.directory / file)
    except (OSError, SafetensorError) as error:
        raise BuildError(f"{found.directory / file} could not be written: {error}") from error
    found.files.update(dict.fromkeys(parts, file))


def _save_tables(found: Calibration, source: TensorSource, tensors: dict[str, OutputTensor]) -> None:
    """Embedding and output matrix in int8, rounded to the nearest."""
    for name in TABLES[:1] if source.spec.tied else TABLES:
        matrix = read_tensor(source, tensors[name], torch.float32)
        scales = int8_scales(matrix)
        number, scale = (tensor.data for tensor in weight_only_tensors(tensors[name], "int8"))
        assert number is not None
        assert scale is not None
        _save(found, f"{name}.safetensors", {number: to_int8(matrix, scales), scale: scales})


def _sequence(index: int, token_ids: Sequence[int]) -> SequenceInput:
    """A sequence that has the cache's block `index`."""
    positions = list(range(len(token_ids)))
    slots = [index * SEQUENCE_TOKENS + position for position in positions]
    return SequenceInput(
        token_ids=token_ids,
        positions=positions,
        cache_len=0,
        block_table=[index],
        slot_mapping=slots,
        num_logits=0,
    )
