"""Sums and joins over tensor-parallel ranks (`plugins.model.communicator`), by mpi4py or PyTorch."""

from typing import TYPE_CHECKING

import torch

from magicdec.runtime.parallel.mpi import TIMEOUT, Ranks

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiCommunicator:
    """Tensors in the CPU's memory, over MPI.

    A sum is taken on every rank, in the order of the ranks and in at least float32: MPI's own sums promise neither the
    same bits on all ranks nor the same order for all sizes, so a row's bits would depend on the rows beside it; and
    they know no bfloat16.
    """

    def __init__(self, ranks: Ranks, comm: "MPI.Comm", timeout: float = TIMEOUT) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._ranks = ranks
        self._comm = comm
        self._timeout = timeout

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Gather all terms and add them up."""
        terms = self._exchange(x).to(torch.promote_types(x.dtype, torch.float32))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., size * n]."""
        return torch.cat(list(self._exchange(x)), dim=-1)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x: [size, *x.shape]."""
        everyone = torch.empty(self.size, *x.shape, dtype=x.dtype)
        mine = x.contiguous().view(torch.uint8).numpy()
        request = self._comm.Iallgather(mine, everyone.view(torch.uint8).numpy())
        self._ranks.wait(request, "exchanging partial results", timeout=self._timeout)
        return everyone


class TorchCommunicator:
    """Tensors on CUDA devices, over NCCL; with another backend of torch.distributed also elsewhere.

    The sum is the backend's own. NCCL gives all ranks the same bits, but may add in another order for other sizes.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup") -> None:
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The backend's sum, in x's dtype."""
        total = x.clone()
        torch.distributed.all_reduce(total, group=self._group)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., size * n]."""
        everyone = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(everyone, x.contiguous(), group=self._group)
        return torch.cat(everyone, dim=-1)
