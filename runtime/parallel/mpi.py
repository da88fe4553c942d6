"""The ranks that mpiexec started: joining them, speaking from rank 0 to all, and ending all when one of them ends.

Nothing here blocks inside MPI: every wait polls, so that a rank that waits for nothing sleeps, and a rank that waits
for one that is gone notices it.
"""

import faulthandler
import functools
import logging
import os
import pickle
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from magicdec.errors import EngineError

if TYPE_CHECKING:
    from mpi4py import MPI

JOIN_TIMEOUT: Final = 300  # seconds for all ranks to start
TIMEOUT: Final = 600.0  # seconds for one exchange in the middle of a pass
_TEXT_BYTES: Final = 2000
_YIELD_FOR: Final = 0.005  # seconds of waiting after which a rank begins to sleep
_LAST_WORDS: Final = 0.5  # seconds; what a launcher has not read yet of a rank's output is lost when the ranks end
_LOOK_EVERY: Final = 0.5  # seconds between two looks at whether the other ranks live
# What launchers tell the processes that they start: MPICH and its kin (hydra, Intel MPI), Open MPI.
_LAUNCHED: Final = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """One rank's process. started: clock ticks after boot, which tell it from a later process of the same number."""

    rank: int
    host: str
    pid: int
    started: int | None

    def lives(self) -> bool:
        """Whether the process runs; always true for one that cannot be seen from here."""
        if self.started is None or self.host != socket.gethostname():
            return True
        state = _process_state(self.pid)
        return state is not None and state[1] == self.started and state[0] not in "ZX"


class Ranks:
    """This process as one of several. Messages go from rank 0 to all others; `communicator`s are made from `comm`."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        mine = _process_state(os.getpid())
        me = Peer(self.rank, socket.gethostname(), os.getpid(), mine and mine[1])
        peers: list[Peer] = comm.allgather(me)
        self._pending: MPI.Request | None = None
        self.others = [peer for peer in peers if peer.rank != self.rank]
        local = [peer for peer in peers if peer.host == me.host]
        self.local_rank, self.num_local = local.index(me), len(local)
        if self.rank == 0 and self.size > 1:
            each = ", ".join(f"rank {peer.rank} is process {peer.pid} on {peer.host}" for peer in peers)
            logger.warning("%d ranks: %s", self.size, each)  # launchers report a killed process by its number alone

    def send(self, message: object) -> None:
        """Rank 0: give a message to all other ranks."""
        data = bytearray(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        self.wait(self.comm.Ibcast(_size_buffer(len(data)), root=0), "sending a call")
        self.wait(self.comm.Ibcast(data, root=0), "sending a call")

    def receive(self) -> Any:
        """Other ranks: the next message, however long it takes."""
        size = _size_buffer(0)
        self.wait(self.comm.Ibcast(size, root=0), "waiting for rank 0", timeout=None)
        data = bytearray(int.from_bytes(size, sys.byteorder))
        self.wait(self.comm.Ibcast(data, root=0), "receiving a call")
        return pickle.loads(data)

    def gather_texts(self, text: str, doing: str) -> list[str]:
        """All ranks: every rank's text, in the order of the ranks, cut at 2,000 bytes; however long it takes."""
        mine = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        everyone = bytearray(_TEXT_BYTES * self.size)
        self.wait(self.comm.Iallgather(mine, everyone), doing, timeout=None)
        parts = (everyone[start : start + _TEXT_BYTES] for start in range(0, len(everyone), _TEXT_BYTES))
        return [bytes(part).rstrip(b"\0").decode(errors="replace") for part in parts]

    def wait(self, request: "MPI.Request", doing: str, *, timeout: float | None = TIMEOUT) -> None:
        """Poll until done. EngineError if another rank's process is gone, or after `timeout` seconds."""
        start = time.monotonic()
        look = start + _LOOK_EVERY
        self._pending = request  # holds the buffers, which MPI may write to even after an error here
        while not request.Test():
            now = time.monotonic()
            if now - start < _YIELD_FOR:
                os.sched_yield()
                continue
            if now >= look:
                self._check_others(doing)
                look = now + _LOOK_EVERY
            if timeout is not None and now - start > timeout:
                raise EngineError(f"no answer from the other ranks after {timeout:g} s while {doing}")
            time.sleep(0.0005 if now - start < 1 else 0.005)

    @contextmanager
    def or_end_all(self, doing: str) -> Iterator[None]:
        """Whatever is raised inside leaves the ranks out of step: report it and end them all."""
        try:
            yield
        except BaseException as error:
            self.end_all(doing, error)

    def end_all(self, doing: str, error: BaseException) -> NoReturn:
        """Report this rank's failure and end every rank at once."""
        cause = f"{type(error).__name__}: {error}"
        trace = None if isinstance(error, EngineError | KeyboardInterrupt) else error
        logger.critical("rank %d failed while %s: %s; all ranks end", self.rank, doing, cause, exc_info=trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS)
        self.comm.Abort(1)
        raise SystemExit(1)

    def _check_others(self, doing: str) -> None:
        gone = [peer for peer in self.others if not peer.lives()]
        if gone:
            each = ", ".join(f"rank {peer.rank} (process {peer.pid})" for peer in gone)
            raise EngineError(f"{each} is gone while rank {self.rank} was {doing}; it was killed or left by itself")


def num_launched() -> int:
    """How many processes a launcher says it started; 1 without one."""
    return next((int(os.environ[name]) for name in _LAUNCHED if name in os.environ), 1)


@functools.cache
def connect(join_timeout: float = JOIN_TIMEOUT) -> Ranks:
    """Start MPI, once a process, and meet the other ranks; the process ends after `join_timeout` s without them.

    EngineError where mpi4py is missing or belongs to another MPI than the launcher.
    """
    faulthandler.dump_traceback_later(join_timeout, exit=True)  # MPI's own start cannot be interrupted otherwise
    try:
        from mpi4py import MPI

        launched, size = num_launched(), MPI.COMM_WORLD.Get_size()
        if launched != 1 and size != launched:
            raise EngineError(
                f"the launcher started {launched} processes, and mpi4py sees {size}: they belong to different MPI "
                "installations; use the mpiexec of the one that mpi4py was built for "
                f"({MPI.Get_library_version().splitlines()[0]})"
            )
        return Ranks(MPI.COMM_WORLD.Dup())
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            f"several ranks need mpi4py and an MPI library ({error}); install both with: pip install 'magicdec[mpi]'"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_num_ranks(built: int, running: int, what: object) -> None:
    """EngineError, with the command to run, unless as many ranks run as the engine was built for."""
    if built == running:
        return
    command = _this_command()
    mend = f"mpiexec -n {built} {command}" if built > 1 else command
    raise EngineError(
        f"{what} was built for {built} tensor-parallel rank{'s' * (built > 1)}, and {running} "
        f"{'run' if running > 1 else 'runs'}; start it with: {mend}"
    )


def _this_command() -> str:
    words: Sequence[str] = sys.orig_argv or [sys.executable, *sys.argv]
    return shlex.join(words)


def _size_buffer(size: int) -> bytearray:
    return bytearray(size.to_bytes(8, sys.byteorder))


def _process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time) from Linux's /proc; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
