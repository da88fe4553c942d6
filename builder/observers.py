"""Observers of a decoder layer's inputs and of its cache, and the numbers that its weights become after them."""

from dataclasses import replace

import torch

from magicdec.builder.rounding import InputStatistics, round_to_fp8, round_to_int4, round_to_int8
from magicdec.builder.storage import INPUT_SCALE, WEIGHT_OFFSET, WEIGHT_SCALE, Storage
from magicdec.pair.config import WeightOnly
from magicdec.plugins.dtypes import TORCH_DTYPES
from magicdec.plugins.fp8 import FP8_MAX
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.linear import DenseLinear, Linear
from magicdec.plugins.model.kv_cache import KVCache
from magicdec.plugins.model.torch_model import Layer, ModelConfig


def fp8_scale(largest: float) -> float:
    """The scale, a float32 number, that maps the largest magnitude to E4M3's largest number."""
    return torch.tensor(largest / FP8_MAX if largest else 1.0, dtype=torch.float32).item()


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


def watch(layer: Layer, storage: Storage) -> "Watches | None":
    """None where weights stay as they are."""
    if storage.weight_only is not None:
        return Watches(layer, None)
    return Watches(layer, TORCH_DTYPES[storage.dtype]) if storage.fp8_weights else None


class Watches:
    """The linear layers of a decoder layer, watched. gate and up are given the same.

    centred_in: see `_Watched`, for the inputs of qkv, gate and up.
    """

    def __init__(self, layer: Layer, centred_in: torch.dtype | None) -> None:
        self.qkv, self.dense = _Watched(layer.qkv, centred_in), _Watched(layer.dense)
        self.gate, self.down = _Watched(layer.gate, centred_in), _Watched(layer.down)
        assert isinstance(layer.up, DenseLinear)
        self.up = layer.up
        self.layer = replace(layer, qkv=self.qkv, dense=self.dense, gate=self.gate, down=self.down)

    @property
    def all_finite(self) -> bool:
        """Whether no layer was given NaN or infinity."""
        return all(watch.moments.isfinite().all() for watch in (self.qkv, self.dense, self.gate, self.down))

    def quantise(self, weight_only: WeightOnly | None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """What the pass found: scales of FP8, and tensors in whatever format; by names without the layer's prefix."""
        scales: dict[str, float] = {}
        rounded: dict[str, torch.Tensor] = {}
        for names, watch, linears in (
            (("attention.qkv.",), self.qkv, [self.qkv.linear]),
            (("attention.dense.",), self.dense, [self.dense.linear]),
            (("mlp.fc.", "mlp.gate."), self.gate, [self.gate.linear, self.up]),
            (("mlp.proj.",), self.down, [self.down.linear]),
        ):
            inputs = InputStatistics(watch.moments)
            if weight_only is not None:
                for name, linear in zip(names, linears, strict=True):
                    rounded |= _weight_only(name, linear.weight, inputs, weight_only)
                continue
            scale = fp8_scale(max(linear.weight.abs().max().item() for linear in linears))
            for name, linear in zip(names, linears, strict=True):
                scales |= {name + WEIGHT_SCALE: scale, name + INPUT_SCALE: fp8_scale(watch.largest_input)}
                rounded[name + "weight"] = round_to_fp8(linear.weight, scale, inputs)
                if watch.centred_in is not None:
                    rounded[name + "bias"] = linear(watch.offset)
        if weight_only is None:
            rounded |= {"input_layernorm.offset": self.qkv.offset, "post_layernorm.offset": self.gate.offset}
        return scales, rounded


def _weight_only(name: str, weight: torch.Tensor, inputs: InputStatistics, kind: WeightOnly) -> dict[str, torch.Tensor]:
    if kind == "int8":
        data, scales = round_to_int8(weight, inputs)
        return {name + "weight": data, name + WEIGHT_SCALE: scales}
    data, scales, offsets = round_to_int4(weight, inputs)
    return {name + "weight": data, name + WEIGHT_SCALE: scales, name + WEIGHT_OFFSET: offsets}


class WatchedCache(KVCache):
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
