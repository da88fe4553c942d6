"""FP8 scales of a model, from one pass over text with observers on its linear layers and its cache.

The pass is that of `runtime.torch_model`, which executes checkpoints: besides the manifest this is the one place where
the builder uses the runtime, since a second implementation of the same model could only differ from it. Layers are
read one at a time, so memory holds one layer and the text's activations, whatever the model's size. (NVIDIA's ModelOpt
makes the same kind of scales, but needs the model whole, as a Hugging Face module.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from magicdec.builder.convert import read_tensor
from magicdec.builder.shard import plan_rank
from magicdec.builder.source import TensorSource
from magicdec.builder.storage import INPUT_SCALE, KV_SCALE, WEIGHT_SCALE, Storage
from magicdec.errors import CheckpointError, ConfigError
from magicdec.plugins.fp8 import FP8_MAX
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


@torch.inference_mode()
def calibrate(
    source: TensorSource, storage: Storage, sequences: Sequence[Sequence[int]], on_layer: Callable[[], None]
) -> dict[str, float]:
    """The scales that `storage` calls for, by their names in a checkpoint; on_layer is called after each layer.

    A scale is the largest magnitude over 448. fc and gate share one for their weights, so that kernels which join them
    can take both as they are. The pass computes in float32.
    """
    config = ModelConfig.from_checkpoint(source.spec.to_trtllm("float32", 1))
    scales: dict[str, float] = {}
    tensors = {tensor.name: tensor for tensor in plan_rank(source.spec, 0, 1)}

    def layers() -> Iterator[Layer]:
        for index in range(config.num_layers):
            names = [name for name in tensors if name.startswith(f"transformer.layers.{index}.")]
            weights = {name: read_tensor(source, tensors[name], torch.float32) for name in names}
            layer, watches = _watch(Layer.from_checkpoint(weights, index))
            yield layer
            if storage.fp8_weights:
                scales.update(_linear_scales(index, watches))
            on_layer()

    names = ("transformer.vocab_embedding.weight", "transformer.ln_f.weight")
    weights = {name: read_tensor(source, tensors[name], torch.float32) for name in names}
    model = TorchModel(replace(config, num_layers=0), weights | {"lm_head.weight": torch.empty(0, config.hidden_size)})
    model.layers = layers()
    cache = _WatchedCache(config, num_slots=len(sequences) * SEQUENCE_TOKENS)
    model.forward(pack([_sequence(*entry) for entry in enumerate(sequences)]), cache, SEQUENCE_TOKENS)
    if storage.fp8_kv:
        for index, largest in enumerate(cache.largest):
            scales[f"transformer.layers.{index}.attention.{KV_SCALE}"] = fp8_scale(largest)
    if not all(torch.isfinite(torch.tensor(scale)) for scale in scales.values()):
        raise CheckpointError(f"{source.path}: the model computes NaN or infinity on the calibration text.")
    return scales


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
    """A linear layer that notes the largest magnitude of its weights and of what it is given."""

    def __init__(self, linear: Linear) -> None:
        assert isinstance(linear, DenseLinear)
        self.linear = linear
        self.largest_weight = linear.weight.abs().max().item()
        self.largest_input = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.largest_input = max(self.largest_input, x.abs().max().item())
        return self.linear(x)


def _watch(layer: Layer) -> tuple[Layer, dict[str, _Watched]]:
    """The layer with watched linear layers, and these by their names in a checkpoint."""
    watched = {name: _Watched(getattr(layer, name)) for name in ("qkv", "dense", "gate", "up", "down")}
    names = {"qkv": "attention.qkv", "dense": "attention.dense", "gate": "mlp.fc", "up": "mlp.gate", "down": "mlp.proj"}
    watches = {names[name]: watch for name, watch in watched.items()}
    return replace(
        layer,
        qkv=watched["qkv"],
        dense=watched["dense"],
        gate=watched["gate"],
        up=watched["up"],
        down=watched["down"],
    ), watches


def _linear_scales(index: int, watches: dict[str, _Watched]) -> dict[str, float]:
    weights = {name: watch.largest_weight for name, watch in watches.items()}
    weights["mlp.fc"] = weights["mlp.gate"] = max(weights["mlp.fc"], weights["mlp.gate"])
    scales = {}
    for name, watch in watches.items():
        scales[f"transformer.layers.{index}.{name}.{WEIGHT_SCALE}"] = fp8_scale(weights[name])
        scales[f"transformer.layers.{index}.{name}.{INPUT_SCALE}"] = fp8_scale(watch.largest_input)
    return scales


class _WatchedCache(KVCache):
    """Room for one layer, which all layers use in turn; `largest` is each layer's largest key or value."""

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

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.largest[layer] = max(keys.abs().max().item(), values.abs().max().item())
        super().write(layer, slots, keys, values)
