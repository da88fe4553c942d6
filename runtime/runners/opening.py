"""Which runner executes an engine directory, described so that every rank can open its own."""

from dataclasses import dataclass
from pathlib import Path

import torch

from magicdec.errors import EngineError
from magicdec.pair.manifest import load_engine
from magicdec.plugins.model.communicator import Communicator
from magicdec.runtime.runners.interface import OpenRunner
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.runners.trtllm.runner import TrtllmRunner


@dataclass(frozen=True)
class RunnerSpec:
    """What `open_runner` needs. engine_dir: the absolute path of a `target/` or `draft/` folder.

    dtype: compute in this type instead of the engine's; PyTorch only.
    """

    engine_dir: Path
    num_blocks: int
    block_size: int
    dtype: torch.dtype | None = None
    device: str = "cpu"


def default_device(engine_dir: Path) -> str:
    """Where an engine runs if nothing else is asked for."""
    return "cuda" if load_engine(engine_dir).backend == "trtllm" else "cpu"


def open_over(target: OpenRunner, engine_dir: Path) -> OpenRunner:
    """The same model with other weights, which reads and writes the KV pool of `target`, a runner of this process."""
    assert isinstance(target, TorchRunner), "such weights are built for PyTorch on one rank only"
    return TorchRunner(
        engine_dir, target.num_blocks, target.block_size, target.dtype, str(target.device), cache=target.cache
    )


def open_runner(spec: RunnerSpec, communicator: Communicator | None = None) -> OpenRunner:
    """This rank's runner, by what built the engine; EngineError if it cannot be loaded or run here."""
    if load_engine(spec.engine_dir).backend == "torch":
        return TorchRunner(spec.engine_dir, spec.num_blocks, spec.block_size, spec.dtype, spec.device, communicator)
    if spec.dtype is not None:
        raise EngineError(
            f"{spec.engine_dir} was compiled by TensorRT-LLM and computes in the type that it was built for; leave "
            "dtype out, or build the pair again with another --dtype"
        )
    rank = communicator.rank if communicator is not None else 0
    return TrtllmRunner(spec.engine_dir, spec.num_blocks, spec.block_size, spec.device, rank=rank)
