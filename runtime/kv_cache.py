"""Keys and values of all layers in one pool of slots."""

import torch


class KVCache:
    """`keys` and `values`: [layers, kv_heads, slots, head_size]; slot = block * block_size + offset.

    The order keeps a run of neighbouring blocks one view for each head: attention reads it where it lies.
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
    ) -> None:
        shape = (num_layers, num_kv_heads, num_slots, head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new rows. slots: [T]; keys, values: [T, kv_heads, head_size]."""
        self.keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, values.transpose(0, 1))
