"""Run on every rank as tests.runtime.parallel.rank_sums checks the communicators themselves, on all ranks at once."""

import time

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.plugins.model.communicator import Communicator
from magicdec.runtime.parallel.communicators import MpiCommunicator, TorchCommunicator
from magicdec.runtime.parallel.mpi import Ranks, connect
from magicdec.runtime.parallel.worker import Groups, start_torch_distributed

SHAPES = ((1, 1), (3, 5), (64, 96), (0, 4), (2, 3, 7))


def main() -> None:
    ranks = connect()
    mpi = Groups(ranks).of(ranks.size, "cpu")
    assert isinstance(mpi, MpiCommunicator)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        check_sums(ranks, mpi, dtype)
        check_joins(ranks, mpi, dtype)
    check_rows_do_not_depend_on_their_neighbours(ranks, mpi)
    check_part_of_the_ranks(ranks)
    check_torch_distributed(ranks)
    check_timeout(ranks)


def terms(ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank brings along, known to all of them; of very different sizes, so that the order counts."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks.size)]
    return [(10.0**rank * torch.randn(shape, generator=g)).to(dtype) for rank, g in enumerate(generators)]


def same_bits(ranks: Ranks, x: torch.Tensor) -> bool:
    bits = x.contiguous().view(torch.uint8).numpy().tobytes()
    return len(set(ranks.comm.allgather(bits))) == 1


def check_sums(ranks: Ranks, communicator: Communicator, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        each = terms(ranks, shape, dtype)
        total = communicator.all_reduce(each[ranks.rank])
        expected = each[0].to(torch.promote_types(dtype, torch.float32))
        for term in each[1:]:
            expected = expected + term
        assert total.dtype == dtype
        assert torch.equal(total, expected.to(dtype)), "not the sum in the order of the ranks"
        assert same_bits(ranks, total)


def check_joins(ranks: Ranks, communicator: Communicator, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        each = terms(ranks, shape, dtype)
        assert torch.equal(communicator.all_gather(each[ranks.rank]), torch.cat(each, dim=-1))
    turned = terms(ranks, (6, 4), dtype)
    assert torch.equal(communicator.all_gather(turned[ranks.rank].T), torch.cat([t.T for t in turned], dim=-1))


def check_rows_do_not_depend_on_their_neighbours(ranks: Ranks, communicator: Communicator) -> None:
    mine = terms(ranks, (4096, 64), torch.float32)[ranks.rank]
    assert torch.equal(communicator.all_reduce(mine)[77:78], communicator.all_reduce(mine[77:78]))


def check_part_of_the_ranks(ranks: Ranks) -> None:
    pair = Groups(ranks).of(2, "cpu")
    assert (pair is not None) == (ranks.rank < 2)
    if pair is not None:
        assert pair.all_reduce(torch.tensor([1.0 + ranks.rank])).item() == 3


def check_torch_distributed(ranks: Ranks) -> None:
    """The communicator of CUDA devices, here over gloo, the backend for the CPU."""
    start_torch_distributed(ranks, "gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    communicator = TorchCommunicator(group)
    assert (communicator.rank, communicator.size) == (ranks.rank, ranks.size)
    each = terms(ranks, (64, 96), torch.float64)
    before = each[ranks.rank].clone()
    total = communicator.all_reduce(each[ranks.rank])
    assert torch.allclose(total, torch.stack(each).sum(0), rtol=1e-12)
    assert torch.equal(each[ranks.rank], before), "the input was changed"
    assert same_bits(ranks, total)
    check_joins(ranks, communicator, torch.float32)
    torch.distributed.destroy_process_group()


def check_timeout(ranks: Ranks) -> None:
    """Rank 0 does not wait for ever for one that lives and does something else."""
    communicator = MpiCommunicator(ranks, ranks.comm.Dup(), timeout=0.3)
    if ranks.rank == 0:
        with pytest.raises(EngineError, match=r"no answer from the other ranks after 0\.3 s while exchanging"):
            communicator.all_reduce(torch.ones(1))
    else:
        time.sleep(1)
        communicator.all_reduce(torch.ones(1))
    ranks.comm.Barrier()


if __name__ == "__main__":
    main()
