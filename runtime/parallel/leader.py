"""Tensor parallel: rank 0 decides everything and tells the other ranks what to compute.

    mpiexec -n 2 python script.py

Every rank runs the script up to `LLM(...)`. There rank 0 goes on alone, and the others serve it until it ends: they
hold their share of the weights and of the KV pool, and repeat each call of a `ParallelRunner` on it. They never
schedule and never sample.
"""

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from magicdec.errors import EngineError
from magicdec.pair.manifest import load_engine
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.parallel.calls import Call, Forget, Forward, Load, ReadKeys, Stop, WriteKeys
from magicdec.runtime.parallel.mpi import Ranks, check_num_ranks, connect, num_launched
from magicdec.runtime.parallel.worker import Groups, Worker, load_share
from magicdec.runtime.runners.interface import OpenRunner
from magicdec.runtime.runners.opening import RunnerSpec, open_runner

T = TypeVar("T")


def join_ranks(tp_size: int = 1) -> "Leader | None":
    """Meet the other ranks, if a launcher started several processes or if the model needs more than one.

    On rank 0: the leader, the same at every call. On other ranks this does not return: they serve rank 0 and leave by
    SystemExit when it ends. None where this process is alone and tp_size is 1; MPI is then not touched.
    """
    return None if max(num_launched(), tp_size) == 1 else _join()


@functools.cache  # MPI can be joined once in a process
def _join() -> "Leader":
    ranks = connect()
    _share_cores(ranks)
    if ranks.rank > 0:
        Worker(ranks).serve()
        raise SystemExit(0)
    leader = Leader(ranks)
    atexit.register(leader.stop)
    return leader


def leave_ranks() -> None:
    """Rank 0, once and for all: end the other ranks and MPI. For a process that ends without Python's own exit."""
    if _join.cache_info().currsize:
        _join().stop()
        from mpi4py import MPI

        MPI.Finalize()


def _share_cores(ranks: Ranks) -> None:
    """Threads of ranks on one machine would otherwise take turns on its cores."""
    cores = len(os.sched_getaffinity(0))
    if torch.get_num_threads() * ranks.num_local > cores:
        torch.set_num_threads(max(cores // ranks.num_local, 1))


class Leader:
    """Rank 0's end of the line. Calls are made one at a time, from any thread."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._groups = Groups(ranks)
        self._lock = threading.Lock()
        self._stopped = False
        self._last_number = 0
        self._dropped: list[int] = []

    def open(self, spec: RunnerSpec) -> OpenRunner:
        """A runner on the first ranks, as many as the engine was built for; EngineError if one of them cannot load."""
        manifest = load_engine(spec.engine_dir)
        tp_size = manifest.tp_size
        if tp_size == 1:
            return open_runner(spec)
        if tp_size > self.ranks.size:
            check_num_ranks(tp_size, self.ranks.size, spec.engine_dir)
        spec = replace(spec, engine_dir=spec.engine_dir.absolute())
        # Compiled engines exchange by themselves, and need no communicator of ours on the device.
        exchange = torch.device(spec.device).type if manifest.backend == "torch" else "cpu"
        load = Load(self.new_number(), spec, tp_size, exchange)
        runner = self.call(load, lambda: load_share(self.ranks, self._groups, load))
        if isinstance(runner, Exception):
            raise runner
        assert runner is not None, "rank 0 has a share of every model"
        return ParallelRunner(self, load.runner, runner, tp_size)

    def call(self, call: Call, own_part: Callable[[], T]) -> T:
        """Let the other ranks do this while rank 0 does its own part. If either fails, all ranks end."""
        with self._lock:
            if self._stopped:
                raise EngineError("the other ranks have been stopped, because this process is ending")
            with self.ranks.or_end_all(call.doing):
                self._send_dropped()
                self.ranks.send(call)
                return own_part()

    def stop(self) -> None:
        """Let the other ranks end."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                with self.ranks.or_end_all(Stop.doing):
                    self.ranks.send(Stop())

    def new_number(self) -> int:
        """A number that no other runner or keys have."""
        self._last_number += 1
        return self._last_number

    def drop(self, number: int) -> None:
        """Rank 0 needs this runner or these keys no more. Finalizers call it, perhaps in the middle of a pass: the
        other ranks are told with the next call."""
        self._dropped.append(number)

    def _send_dropped(self) -> None:
        numbers = [self._dropped.pop() for _ in range(len(self._dropped))]
        if numbers:
            self.ranks.send(Forget(numbers))


class ParallelRunner:
    """A `ModelRunner` on rank 0 whose calls run on all ranks of its model."""

    def __init__(self, leader: Leader, number: int, local: OpenRunner, tp_size: int) -> None:
        self.vocab_size = local.vocab_size
        self.num_blocks = local.num_blocks
        self.block_size = local.block_size
        self.tp_size = tp_size
        self._leader = leader
        self._number = number
        self._local = local
        self._key_numbers: dict[int, int] = {}  # by id of rank 0's own tensor
        weakref.finalize(self, leader.drop, number).atexit = False

    @property
    def dtype(self) -> torch.dtype:
        """The type that is computed in."""
        return self._local.dtype

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool, over all ranks."""
        return self.tp_size * self._local.kv_bytes

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """The whole logits [N, vocab_size]."""
        return self._leader.call(Forward.of(self._number, inputs), lambda: self._local.forward(inputs))

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Rank 0's own share of the keys; the other ranks keep theirs for as long as this tensor lives."""
        number = self._leader.new_number()
        call = ReadKeys(self._number, number, slots, positions)
        keys = self._leader.call(call, lambda: self._local.read_keys(slots, positions))
        self._key_numbers[id(keys)] = number
        weakref.finalize(keys, self._drop_keys, id(keys)).atexit = False
        return keys

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Every rank writes the share that it kept of these keys, which `read_keys` returned."""
        call = WriteKeys(self._number, self._key_numbers[id(keys)], slots, positions)
        self._leader.call(call, lambda: self._local.write_keys(slots, positions, keys))

    def _drop_keys(self, identity: int) -> None:
        self._leader.drop(self._key_numbers.pop(identity))
