"""What a split model needs of the other ranks: sums and joins.

Every rank must call them in the same order with tensors of the same shape.
"""

from typing import Protocol

import torch


class Communicator(Protocol):
    """The ranks that run one model together."""

    rank: int  # of this process, 0 .. size - 1
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, with the same bits on all ranks."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x side by side along the last dimension, in the order of the ranks."""
        ...


class SingleRank:
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x
