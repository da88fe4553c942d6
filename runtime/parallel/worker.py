"""A rank that is not rank 0: it holds its share of each model and repeats rank 0's calls on it."""

import signal
import socket
import threading
from dataclasses import replace

import torch

from magicdec.errors import EngineError, MagicDecError
from magicdec.plugins.model.communicator import Communicator
from magicdec.runtime.parallel.calls import Call, Forget, Forward, Load, ReadKeys, Stop, WriteKeys
from magicdec.runtime.parallel.communicators import MpiCommunicator, TorchCommunicator
from magicdec.runtime.parallel.mpi import Ranks
from magicdec.runtime.runners.interface import OpenRunner
from magicdec.runtime.runners.opening import open_runner


class Worker:
    """Serves rank 0 until it says stop. Whatever is raised here ends all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._groups = Groups(ranks)
        self._runners: dict[int, OpenRunner] = {}  # only models of which this rank has a share
        self._keys: dict[int, torch.Tensor] = {}

    def serve(self) -> None:
        """Do as told, in order."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and decides
        while True:
            with self.ranks.or_end_all("waiting for rank 0"):
                call = self.ranks.receive()
            if isinstance(call, Stop):
                return
            with self.ranks.or_end_all(call.doing):
                self._do(call)

    def _do(self, call: Call) -> None:
        match call:
            case Load():
                runner = load_share(self.ranks, self._groups, call)
                if runner is not None and not isinstance(runner, Exception):
                    self._runners[call.runner] = runner
            case Forget():
                for number in call.numbers:
                    self._runners.pop(number, None)
                    self._keys.pop(number, None)
            case Forward() | ReadKeys() | WriteKeys():
                if call.runner in self._runners:
                    self._run(self._runners[call.runner], call)
            case _:
                raise TypeError(f"rank 0 sent {call!r}")

    def _run(self, runner: OpenRunner, call: Forward | ReadKeys | WriteKeys) -> None:
        match call:
            case Forward():
                runner.forward(call.inputs)
            case ReadKeys():
                self._keys[call.keys] = runner.read_keys(call.slots, call.positions)
            case WriteKeys():
                runner.write_keys(call.slots, call.positions, self._keys[call.keys])


def load_share(ranks: Ranks, groups: "Groups", load: Load) -> OpenRunner | Exception | None:
    """This rank's runner, or on all ranks an error if any rank could not load; None on a rank that has no share.

    All ranks call this together.
    """
    communicator = groups.of(load.tp_size, load.exchange)
    runner, error = None, None
    if communicator is not None:
        device = f"cuda:{ranks.local_rank}" if load.spec.device == "cuda" else load.spec.device
        try:
            runner = open_runner(replace(load.spec, device=device), communicator)
        except Exception as failure:  # reported to rank 0, which raises it
            error = failure
    texts = ranks.gather_texts("" if error is None else _describe(error), load.doing)
    if error is not None:
        return error
    failed = next((rank for rank, text in enumerate(texts) if text), None)
    return runner if failed is None else EngineError(f"rank {failed} cannot load its share: {texts[failed]}")


class Groups:
    """Communicators of ranks 0 .. size - 1, made once each; all ranks ask for the same ones in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made: dict[tuple[int, str], Communicator | None] = {}

    def of(self, size: int, device: str) -> Communicator | None:
        """The communicator for tensors on "cpu" or "cuda"; None if this rank is not one of them."""
        if (size, device) not in self._made:
            self._made[size, device] = self._over_mpi(size) if device == "cpu" else self._over_nccl(size)
        return self._made[size, device]

    def _over_mpi(self, size: int) -> Communicator | None:
        ranks = self._ranks
        part = ranks.comm.Split(color=0 if ranks.rank < size else 1, key=ranks.rank)
        return MpiCommunicator(ranks, part) if ranks.rank < size else None

    def _over_nccl(self, size: int) -> Communicator | None:
        if not torch.distributed.is_initialized():
            torch.cuda.set_device(self._ranks.local_rank)
            start_torch_distributed(self._ranks, "nccl")
        group = torch.distributed.new_group(list(range(size)))
        return TorchCommunicator(group) if self._ranks.rank < size else None


def start_torch_distributed(ranks: Ranks, backend: str) -> None:
    """torch.distributed over the same ranks; they find each other at an address that rank 0 gives over MPI."""
    address = ranks.comm.bcast(_free_address() if ranks.rank == 0 else None)
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://{address}", rank=ranks.rank, world_size=ranks.size
    )


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{socket.gethostname()}:{free.getsockname()[1]}"


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, MagicDecError) else f"{type(error).__name__}: {error}"
