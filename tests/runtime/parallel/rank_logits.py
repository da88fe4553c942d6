"""Run on every rank as tests.runtime.parallel.rank_logits OUTPUT ENGINE... writes the logits that each engine gives.

One tensor [rows, vocabulary] an engine. With --faults the first engine follows once more with each of FAULTS.
"""

import sys
from pathlib import Path

import torch

from magicdec.runtime.parallel.communicators import MpiCommunicator
from magicdec.runtime.parallel.leader import Leader, join_ranks
from magicdec.runtime.runners.interface import OpenRunner
from tests.runtime.parallel.pairs import float64_spec, passes

FAULTS = ("no sum after the first attention", "no sum after the last MLP", "logits of the ranks exchanged")
SUMS_IN_A_PASS = 4  # two layers


def main() -> None:
    output, *engines = [Path(arg) for arg in sys.argv[1:] if arg != "--faults"]
    if "--faults" in sys.argv:
        break_communication(["none"] * len(engines) + [*FAULTS])
        engines += [engines[0]] * len(FAULTS)
    leader = join_ranks(2)
    assert leader is not None
    torch.save([logits(leader, engine) for engine in engines], output)


def logits(leader: Leader, engine: Path) -> torch.Tensor:
    runner: OpenRunner = leader.open(float64_spec(engine))
    return torch.cat([runner.forward(inputs) for inputs in passes()])


def break_communication(faults: list[str]) -> None:
    """Every time that the passes begin anew, the next of `faults` holds; all ranks count alike."""
    sound_sum, sound_gather = MpiCommunicator.all_reduce, MpiCommunicator.all_gather
    num_sums = num_gathers = 0

    def all_reduce(self: MpiCommunicator, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_sums
        fault = faults[num_gathers // len(passes())]
        place = num_sums % SUMS_IN_A_PASS
        num_sums += 1
        skipped = {FAULTS[0]: 0, FAULTS[1]: SUMS_IN_A_PASS - 1}.get(fault)
        return x if place == skipped else sound_sum(self, x)

    def all_gather(self: MpiCommunicator, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_gathers
        fault = faults[num_gathers // len(passes())]
        num_gathers += 1
        whole = sound_gather(self, x)
        return torch.cat(list(whole.chunk(self.size, dim=-1))[::-1], dim=-1) if fault == FAULTS[2] else whole

    MpiCommunicator.all_reduce = all_reduce  # type: ignore[method-assign]
    MpiCommunicator.all_gather = all_gather  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
