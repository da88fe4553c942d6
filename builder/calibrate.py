"""FP8 scales and weights of a model, from one pass over text with observers on its linear layers and its cache.

The pass is that of `runtime.torch_model`, which executes checkpoints: besides the manifest this is the one place where
the builder uses the runtime, since a second implementation of the same model could only differ from it. Layers are
read one at a time, so memory holds one layer and the text's activations, whatever the model's size. (NVIDIA's ModelOpt
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

from magicdec.builder.convert import TORCH_DTYPES, read_tensor
from magicdec.builder.rounding import InputStatistics, round_to_fp8
from magicdec.builder.shard import OutputTensor, plan_offsets, plan_rank
from magicdec.builder.source import TensorSource
from magicdec.builder.storage import INPUT_SCALE, KV_SCALE, WEIGHT_SCALE, Storage
from magicdec.errors import BuildError, CheckpointError, ConfigError
from magicdec.plugins.fp8 import FP8_MAX
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.linear import DenseLinear, Linear
from magicdec.runtime.kv_cache import KVCache
from magicdec.runtime.model_input import SequenceInput, pack
from magicdec.runtime.torch_model import Layer, ModelConfig, TorchModel

# Static scales saturate what is larger than anything in these tokens.
CALIBRATION_TOKENS = 8192
SEQUENCE_TOKENS = 512
_MIN_TOKENS = 256
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
    """Scales by their names in a checkpoint; FP8 weights, offsets and biases by the source's names."""

    scales: dict[str, float]
    directory: Path
    files: dict[str, str]

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> torch.Tensor:
        """Rows, and columns if not all, of a matrix as it was rounded to FP8, or of an offset or bias in float32."""
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
    """The scales that `storage` calls for, and the weights in FP8, written to the folder `scratch` layer by layer.

    A scale is the largest magnitude over 448. fc and gate share one for their weights, so that kernels which join them
    can take both as they are. The pass computes in float32. on_layer is called after each layer.
    """
    config = ModelConfig.from_checkpoint(source.spec.to_trtllm("float32", 1))
    found = Calibration({}, scratch, {})
    tensors = {tensor.name: tensor for tensor in plan_rank(source.spec, 0, 1)}
    results = tensors | {tensor.name: tensor for tensor in plan_offsets(source.spec, 0, 1)}

    def layers() -> Iterator[Layer]:
        for index in range(config.num_layers):
            prefix = f"transformer.layers.{index}."
            mine = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            weights = {name: read_tensor(source, tensor, torch.float32) for name, tensor in mine.items()}
            layer = Layer.from_checkpoint(weights, index)
            watches = _Watches(layer, TORCH_DTYPES[storage.dtype]) if storage.fp8_weights else None
            yield watches.layer if watches is not None else layer
            if watches is not None:
                scales, rounded = watches.quantise()
                found.scales.update({prefix + name: scale for name, scale in scales.items()})
                _save(found, f"layer{index}.safetensors", {results[prefix + n]: w for n, w in rounded.items()})
            on_layer()

    names = ("transformer.vocab_embedding.weight", "transformer.ln_f.weight")
    weights = {name: read_tensor(source, tensors[name], torch.float32) for name in names}
    model = TorchModel(replace(config, num_layers=0), weights | {"lm_head.weight": torch.empty(0, config.hidden_size)})
    model.layers = layers()
    cache = _WatchedCache(config, num_slots=len(sequences) * SEQUENCE_TOKENS)
    model.forward(pack([_sequence(*entry) for entry in enumerate(sequences)]), cache, SEQUENCE_TOKENS)
    if storage.fp8_kv:
        for index, largest in enumerate(cache.largest):
            found.scales[f"transformer.layers.{index}.attention.{KV_SCALE}"] = fp8_scale(largest)
    if not all(math.isfinite(scale) for scale in found.scales.values()):
        raise CheckpointError(f"{source.path}: the model computes NaN or infinity on the calibration text.")
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


def fp8_scale(largest: float) -> float:
    """The scale, a float32 number, that maps the largest magnitude to E4M3's largest number."""
    return torch.tensor(largest / FP8_MAX if largest else 1.0, dtype=torch.float32).item()


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


class _Watched:
    """A linear layer that notes what it is given: the largest magnitude, and the second moments [in, in].

    It is called once, with the whole text. centred_in: None, or the dtype in which the inputs' mean is kept as
    `offset` [in]; the rest is then measured behind its subtraction.
    """

    def __init__(self, linear: Linear, centred_in: torch.dtype | None = None) -> None:
        assert isinstance(linear, DenseLinear)
        self.linear = linear
        self.centred_in = centred_in
        self.offset = torch.zeros(())
        self.largest_input = 0.0
        self.moments = torch.zeros(())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred_in is not None:
            self.offset = x.mean(0).to(self.centred_in).float()
        rest = x - self.offset
        self.largest_input = rest.abs().max().item()
        self.moments = rest.T @ rest
        return self.linear(x)


class _Watches:
    """The linear layers of a decoder layer, watched. gate and up are given the same."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.qkv, self.dense = _Watched(layer.qkv, centred_in=dtype), _Watched(layer.dense)
        self.gate, self.down = _Watched(layer.gate, centred_in=dtype), _Watched(layer.down)
        assert isinstance(layer.up, DenseLinear)
        self.up = layer.up
        self.layer = replace(layer, qkv=self.qkv, dense=self.dense, gate=self.gate, down=self.down)

    def quantise(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """After the pass: scales, and FP8 weights, offsets and biases; by their names without the layer's prefix."""
        scales: dict[str, float] = {}
        rounded = {"input_layernorm.offset": self.qkv.offset, "post_layernorm.offset": self.gate.offset}
        for names, watch, linears in (
            (("attention.qkv.",), self.qkv, [self.qkv.linear]),
            (("attention.dense.",), self.dense, [self.dense.linear]),
            (("mlp.fc.", "mlp.gate."), self.gate, [self.gate.linear, self.up]),
            (("mlp.proj.",), self.down, [self.down.linear]),
        ):
            scale = fp8_scale(max(linear.weight.abs().max().item() for linear in linears))
            inputs = InputStatistics(watch.moments)
            for name, linear in zip(names, linears, strict=True):
                scales |= {name + WEIGHT_SCALE: scale, name + INPUT_SCALE: fp8_scale(watch.largest_input)}
                rounded[name + "weight"] = round_to_fp8(linear.weight, scale, inputs)
                if watch.centred_in is not None:
                    rounded[name + "bias"] = linear(watch.offset)
        return scales, rounded


class _WatchedCache(KVCache):
    """Room for one layer, which all layers use in turn; `largest` is each layer's largest turned key or value."""

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        super().__init__(
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            num_slots=num_slots,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.keys = self.keys.expand(config.num_layers, -1, -1, -1)
        self.values = self.values.expand(config.num_layers, -1, -1, -1)
        self.largest = [0.0] * config.num_layers
        self._turn = Hadamard(config.head_size, torch.float32)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.largest[layer] = max(self._turn.keys(keys).abs().max().item(), values.abs().max().item())
        super().write(layer, slots, keys, values)
