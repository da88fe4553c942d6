"""The peers, each in a virtual environment of its own with pinned versions."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

TORCH = f"torch=={version('torch').split('+')[0]}"
HERE = Path(__file__).resolve().parent


class NotAvailable(Exception):
    """A peer could not be installed or prepared; the text says why."""


@dataclass(frozen=True)
class Peer:
    """An engine to compare with. modes: plain first; batch_modes: those in which it decodes several sequences.

    unwanted: packages that its requirements bring, and that are taken out again.
    """

    name: str
    worker: str
    requirements: tuple[str, ...]
    modes: tuple[str, ...]
    batch_modes: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


OUR_MODES = ("plain", "self", "self-int4", "ngram")
OURS = Peer("magicdec", "magicdec_worker.py", (), OUR_MODES, OUR_MODES)
PEERS = (
    Peer(
        "transformers",
        "transformers_worker.py",
        (TORCH, "transformers==5.24.0"),
        ("plain", "lookup"),
        ("plain",),  # it refuses assisted generation of a batch
    ),
    Peer("llama.cpp", "llamacpp_worker.py", ("xllamacpp==2026.10.11549",), ("plain", "lookup"), ("plain", "lookup")),
    Peer(
        "openvino-genai",
        "openvino_worker.py",
        ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", TORCH),
        ("plain", "lookup"),
        ("plain", "lookup"),
        unwanted=("torchvision",),  # a build for CUDA beside a PyTorch for CPUs fails at import
    ),
)


def python_of(peer: Peer, directory: Path, timeout: float) -> Path:
    """The interpreter of the peer's environment, made if need be; NotAvailable says what pip said."""
    if not peer.requirements:
        return Path(sys.executable)
    environment = directory / peer.name
    python, done = environment / "bin" / "python", environment / "installed"
    content = "\n".join([*peer.requirements, *(f"not {name}" for name in peer.unwanted)])
    if done.is_file() and done.read_text() == content:
        return python
    sys.stderr.write(f"installing {', '.join(peer.requirements)}\n")
    run([sys.executable, "-m", "venv", "--clear", str(environment)], timeout)
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements], timeout)
    if peer.unwanted:
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unwanted], timeout)
    done.write_text(content)
    return python


def versions_of(python: Path, peer: Peer) -> dict[str, str]:
    """Installed versions of what the peer is made of."""
    names = [requirement.split("==")[0].split("[")[0] for requirement in peer.requirements] or ["magicdec"]
    code = "import sys, importlib.metadata as m; print(*(m.version(n) for n in sys.argv[1:]))"
    found = run([str(python), "-c", code, *names], 60).split()
    return dict(zip(names, found, strict=True))


def run(command: list[str], timeout: float) -> str:
    """Standard output; NotAvailable with the end of standard error where the command fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{' '.join(command[1:5])} ... took over {timeout:.0f} s") from None
    if done.returncode:
        raise NotAvailable((done.stderr.strip() or f"exit code {done.returncode}")[-600:])
    return done.stdout
