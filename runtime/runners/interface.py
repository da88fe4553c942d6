"""The one thing that the engine needs of a device: a forward pass over a paged cache."""

from typing import Protocol

import torch

from magicdec.plugins.model.inputs import ModelInput


class ModelRunner(Protocol):
    """Executes one model with a pool of `num_blocks` KV blocks."""

    vocab_size: int  # usable token ids; logits have this many columns
    num_blocks: int
    block_size: int

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Write the new rows' keys and values to their slots; return the wanted rows' logits [N, vocab_size]."""
        ...

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """The keys at these slots, rotated back from the positions that they stand at: a copy without positions."""
        ...

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Write position-free keys (from `read_keys`) to these slots, rotated to these positions."""
        ...


class OpenRunner(ModelRunner, Protocol):
    """A runner with its weights and its pool of KV blocks in memory."""

    @property
    def dtype(self) -> torch.dtype:
        """The type that is computed in."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool, over all ranks."""
        ...
