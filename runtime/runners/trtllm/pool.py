"""The paged KV pool as TensorRT-LLM's attention plugin reads and writes it, and the keys in it."""

from collections.abc import Sequence

import torch

from magicdec.plugins.fp8 import FP8_MAX
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.rotary import Rotary, rotate
from magicdec.runtime.runners.trtllm.memory import Memory, Staging, aligned


class KVPool:
    """One pool [blocks, layers, 2 (keys, values), kv_heads, tokens_per_block, head_size].

    scales: [layers] of an FP8 pool, which stores float8_e4m3fn(x / scale) as bytes, keys turned (`plugins.hadamard`);
    None where the pool holds x itself in `dtype`. The plugin is only given the pool's address, so that anything on the
    same stream may rewrite it.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        rotary: Rotary,
        scales: torch.Tensor | None,
        max_slots: int,
    ) -> None:
        self.memory = memory
        stored = dtype if scales is None else torch.int8
        self.tensor = memory.device((num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), stored)
        self.block_size = block_size
        self.rotary = rotary
        self.rotary.inverse_frequencies = rotary.inverse_frequencies.to(memory.device_name)
        self._scales = None if scales is None else scales.to(memory.device_name, torch.float32).view(-1, 1, 1, 1)
        self._turned = Hadamard(head_size, torch.float32, memory.device_name)
        self._staging = Staging(memory, 3 * aligned(max_slots))  # blocks, offsets, positions

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return self.tensor.nbytes

    @torch.inference_mode()
    def read_keys(self, slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Position-free keys [layers, kv_heads, n, head_size] in float32, on the device."""
        blocks, offsets, where = self._stage(slots, positions)
        with self.memory.on_stream():
            stored = self.tensor[blocks, :, 0, :, offsets]  # [n, layers, kv_heads, head_size]
            if self._scales is None:
                keys = stored.to(torch.float32).permute(1, 2, 0, 3)
            else:
                turned = stored.view(torch.float8_e4m3fn).to(torch.float32).permute(1, 2, 0, 3) * self._scales
                keys = self._turned.turn_back(turned)
            return self._turn(keys, where, back=True)

    @torch.inference_mode()
    def write_keys(self, slots: Sequence[int], positions: Sequence[int], keys: torch.Tensor) -> None:
        """Rotate position-free keys to these positions and store them."""
        blocks, offsets, where = self._stage(slots, positions)
        with self.memory.on_stream():
            rotated = self._turn(keys.to(self.memory.device_name), where, back=False)
            if self._scales is None:
                stored = rotated.to(self.tensor.dtype)
            else:
                scaled = (self._turned.keys(rotated) / self._scales).clamp(-FP8_MAX, FP8_MAX)
                stored = scaled.to(torch.float8_e4m3fn).view(torch.int8)
            self.tensor[blocks, :, 0, :, offsets] = stored.permute(2, 0, 1, 3)

    def _stage(self, slots: Sequence[int], positions: Sequence[int]) -> list[torch.Tensor]:
        """Blocks, offsets and positions as int32 on the device."""
        where = torch.tensor(slots, dtype=torch.int32)
        self._staging.begin()
        rows = (where // self.block_size, where % self.block_size, torch.tensor(positions, dtype=torch.int32))
        homes = [self._staging.put(row)[1] for row in rows]
        self._staging.upload()
        self._staging.end()
        return homes

    def _turn(self, keys: torch.Tensor, positions: torch.Tensor, *, back: bool) -> torch.Tensor:
        cos, sin = self.rotary.angles(positions)  # [n, 1, head_size]
        cos, sin = cos.squeeze(1), sin.squeeze(1)
        return rotate(keys, cos, -sin if back else sin)
