"""Keys and values of all layers in one pool of slots, in the model's dtype or in FP8."""

from collections.abc import Sequence

import torch

from magicdec.plugins.cpu.library import use_huge_pages
from magicdec.plugins.fp8 import FP8, from_fp8, to_fp8
from magicdec.plugins.hadamard import Hadamard


class KVCache:
    """`keys` and `values`: [layers, kv_heads, slots, head_size]; slot = block * block_size + offset.

    The order keeps a run of neighbouring blocks one view for each head: attention reads it where it lies.
    fp8_scales: None, or one for each layer; entries are then E4M3, one byte each, and stand for entry * scale. Their
    keys are turned; attention has to turn its queries by `turn`, which is None otherwise.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8_scales: Sequence[float] | None = None,
    ) -> None:
        shape = (num_layers, num_kv_heads, num_slots, head_size)
        self.fp8_scales = fp8_scales
        self.turn = None if fp8_scales is None else Hadamard(head_size, dtype, device)
        self.dtype = dtype if fp8_scales is None else FP8
        self.keys, self.values = (use_huge_pages(torch.empty(shape, dtype=self.dtype, device=device)) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def scale(self, layer: int) -> float:
        """What a layer's entries have to be multiplied with."""
        return 1.0 if self.fp8_scales is None else self.fp8_scales[layer]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new rows. slots: [T]; keys, values: [T, kv_heads, head_size]."""
        turned = keys if self.turn is None else self.turn.keys(keys)
        self._store(self.keys, layer, slots, turned.transpose(0, 1))
        self._store(self.values, layer, slots, values.transpose(0, 1))

    def read_keys(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the keys at slots [n], as numbers: [layers, kv_heads, n, head_size]."""
        keys = self.keys[:, :, slots]
        if self.fp8_scales is None:
            return keys.to(dtype)
        scales = torch.tensor(self.fp8_scales, dtype=dtype, device=keys.device)
        return self._turn_in(dtype).turn_back(from_fp8(keys, dtype) * scales.view(-1, 1, 1, 1))

    def write_keys(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Store keys [layers, kv_heads, n, head_size] at slots [n]."""
        turned = keys if self.turn is None else self._turn_in(keys.dtype).keys(keys)
        for layer, rows in enumerate(turned):
            self._store(self.keys, layer, slots, rows)

    def _turn_in(self, dtype: torch.dtype) -> Hadamard:
        return Hadamard(self.keys.shape[-1], dtype, self.keys.device)

    def _store(self, pool: torch.Tensor, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """rows: [kv_heads, n, head_size]."""
        if self.fp8_scales is None:
            pool[layer].index_copy_(1, slots, rows.to(self.dtype))
        else:  # as bytes: not every PyTorch can index FP8 tensors
            data = to_fp8(rows, self.fp8_scales[layer]).view(torch.uint8)
            pool.view(torch.uint8)[layer].index_copy_(1, slots, data)
