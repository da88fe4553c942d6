"""Run on every rank as tests.runtime.parallel.rank_dies WAY ENGINE... one rank fails while another generates."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from magicdec.errors import EngineError
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.llm import LLM
from magicdec.runtime.parallel.mpi import connect
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def fail() -> NoReturn:
    raise RuntimeError("the memory is full of \N{SNOWMAN}")


def main() -> None:
    way, *engines = sys.argv[1:]
    if way in ("worker raises", "worker killed"):
        break_forward(rank=1, how=fail if way == "worker raises" else die)
    if way == "rank 0 raises in a pass":
        break_forward(rank=0, how=fail)
    for engine in engines:
        print(answer(engine), flush=True)  # noqa: T201
    if way == "rank 0 killed":
        die()
    raise ValueError("an error of the script")


def answer(engine: str) -> object:
    try:
        return LLM(engine).generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids
    except EngineError as error:
        return error


def break_forward(rank: int, how: Callable[[], NoReturn]) -> None:
    """The fourth pass of this rank's runner ends so."""
    if connect().rank != rank:
        return
    sound, calls = TorchRunner.forward, iter(range(100))

    def forward(self: TorchRunner, inputs: ModelInput) -> torch.Tensor:
        if next(calls) == 3:
            how()
        return sound(self, inputs)

    TorchRunner.forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
