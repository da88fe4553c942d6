"""A real Triton Inference Server on this machine's CPU: the one inside of the nvidia-pytriton wheel."""

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 60
STOP_SECONDS = 40
INSTALL = "pip install --no-deps nvidia-pytriton==0.7.0"


@dataclass
class TritonServer:
    """A running server. log: what it and the models print."""

    process: "subprocess.Popen[bytes]"
    http: str
    grpc: str
    metrics_url: str
    log: Path

    def is_ready(self) -> bool:
        """Whether all models are loaded; the metrics' endpoint comes up last."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200) and bool(self.metrics())
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Each sample of the metrics endpoint, by its name and labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def stop(self) -> int:
        """Ask it to end, wait, and end what is left of it; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            kill(self.process)


def start(
    repository: Path,
    work: Path,
    *,
    within: Sequence[str] = (),
    after: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> TritonServer:
    """Serve all models of a repository on free ports of the loopback interface; waits until they are ready.

    within, after: words before and behind the server's command line, e.g. mpiexec's.
    """
    http, grpc, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    log = work / "triton.log"
    command = [*within, *_command(repository, work, http, grpc, metrics), *after]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=_environment() | (env or {}), stdout=file, stderr=file, cwd=work, start_new_session=True
        )
    server = TritonServer(process, http, grpc, f"http://{metrics}/metrics", log)
    end = time.monotonic() + START_SECONDS
    while not server.is_ready():
        if process.poll() is not None or time.monotonic() > end:
            kill(process)
            raise AssertionError(f"Triton is not ready (exit status {process.returncode}):\n{log.read_text()}")
        time.sleep(0.05)
    return server


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def kill(process: "subprocess.Popen[Any]") -> None:
    """End a process that was started in a session of its own, and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(10)


def _command(repository: Path, work: Path, http: str, grpc: str, metrics: str) -> list[str]:
    server = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
    if not server.is_dir():
        raise AssertionError(f"there is no Triton in this Python; install it with: {INSTALL}")
    addresses = [
        f"--{name}-{part}={value}"
        for name, address in (("http", http), ("grpc", grpc), ("metrics", metrics))
        for part, value in zip(("address", "port"), address.split(":"), strict=True)
    ]
    return [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={_backends(server, work / 'backends')}",
        "--disable-auto-complete-config",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-gpu-metrics=false",
        "--exit-timeout-secs=8",
        "--metrics-interval-ms=100",
        *addresses,
    ]


def _backends(server: Path, directory: Path) -> Path:
    """A backend directory with the Python backend, its utilities, and the stub for this version of Python."""
    python = directory / "python"
    python.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in (
        server / "backends" / "python" / "libtriton_python.so",
        server / "backends" / "python" / "triton_python_backend_utils.py",
        server / "python_backend_stubs" / version / "triton_python_backend_stub",
    ):
        (python / file.name).symlink_to(file)
    return directory


def _environment() -> dict[str, str]:
    """The stub finds this virtual environment by PATH, and libpython by LD_LIBRARY_PATH; one thread a process."""
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def serving(models: Path, work: Path) -> Iterator[TritonServer]:
    """A server that is ready; at the end it leaves with status 0, and its log holds no traceback."""
    running = start(models, work)
    try:
        yield running
    finally:
        status = running.stop()
    assert status == 0, running.log.read_text()[-3000:]
    assert "Traceback" not in running.log.read_text(), running.log.read_text()[-3000:]
