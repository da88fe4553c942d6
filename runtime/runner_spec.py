"""Which runner executes an engine directory, described so that every rank can open its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from magicdec.runtime.communicator import Communicator
from magicdec.runtime.model_runner import ModelRunner
from magicdec.runtime.torch_runner import TorchRunner


class OpenRunner(ModelRunner, Protocol):
    """A runner with its weights and its pool of KV blocks in memory."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool, over all ranks."""
        ...


@dataclass(frozen=True)
class RunnerSpec:
    """What `open_runner` needs. engine_dir: the absolute path of a `target/` or `draft/` folder."""

    engine_dir: Path
    num_blocks: int
    block_size: int
    dtype: torch.dtype | None = None
    device: str = "cpu"


def open_runner(spec: RunnerSpec, communicator: Communicator | None = None) -> OpenRunner:
    """This rank's runner; EngineError if the directory cannot be loaded or run here."""
    return TorchRunner(spec.engine_dir, spec.num_blocks, spec.block_size, spec.dtype, spec.device, communicator)
