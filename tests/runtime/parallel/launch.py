"""Starting real MPI ranks: `mpiexec` of the mpich package, which lies beside this Python."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

MPIEXEC = Path(sys.executable).parent / "mpiexec"
# Started so, a rank that dies is not noticed by the launcher for some seconds, as if it ran inside of a server.
HIDDEN = ("sh", "-c", '"$@"; code=$?; sleep 3; exit $code', "sh")


@dataclass(frozen=True)
class Ended:
    """What became of the ranks."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    num_ranks: int, module: str, *args: object, within: Sequence[str] = (), stdin: str = "", timeout: float = 60
) -> Ended:
    """Run `python -m module args` on so many ranks; fails the test if they have not ended after `timeout` seconds."""
    command = [str(MPIEXEC), "-n", str(num_ranks), *within, sys.executable, "-m", module, *map(str, args)]
    return run(command, stdin=stdin, timeout=timeout)


def run(command: Sequence[str], *, stdin: str = "", timeout: float = 60) -> Ended:
    """Run a command in the repository with one thread a process, in a session of its own."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher then kills its ranks
        try:
            stdout, stderr = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        raise AssertionError(f"{command} hung for {timeout} s:\n{stdout}\n{stderr}") from None
    return Ended(process.returncode, stdout, stderr)


def run_ok(num_ranks: int, module: str, *args: object, timeout: float = 60) -> Ended:
    """As `run_ranks`; they must all end well."""
    ended = run_ranks(num_ranks, module, *args, timeout=timeout)
    assert ended.returncode == 0, ended
    return ended
