"""A machine and requests that exist as numbers only: what a draft controller is told, and how fast its choices are."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.engine.drafting import Round
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftChoice
from tests.support import toy

PLAIN_SECONDS = 0.02


@dataclass
class Machine:
    """Costs in plain steps: of a draft pass, and of verifying max_draft_len tokens; acceptance of each draft token.

    bend: how verification grows with the number of drafts: 1 = evenly, above 1 = slowly at first.
    """

    draft: float
    verify: float
    acceptance: float
    max_draft_len: int = 8
    bend: float = 1.0
    noise: float = 0.03
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def target_seconds(self, lengths: Sequence[int]) -> float:
        """Of a pass over all requests."""
        share = sum(lengths) / len(lengths) / self.max_draft_len
        return PLAIN_SECONDS * (1 + (self.verify - 1) * math.pow(share, self.bend))

    def draft_seconds(self, length: int) -> float:
        """Of so many draft passes."""
        return PLAIN_SECONDS * self.draft * length

    def rate(self, length: int) -> float:
        """Tokens a second of one request with a fixed draft length, on average."""
        tokens = sum(self.acceptance**j for j in range(length + 1))
        return tokens / (self.draft_seconds(length) + self.target_seconds([length]))

    def best(self) -> tuple[float, int]:
        """The best rate of any fixed length, plain decoding included."""
        return max((self.rate(length), length) for length in range(self.max_draft_len + 1))

    def blur(self) -> float:
        """What a measured time is multiplied with."""
        return max(0.5, self.rng.gauss(1, self.noise))

    def accepted(self, length: int) -> int:
        """Of one draft."""
        return next((j for j in range(length) if self.rng.random() >= self.acceptance), length)


class Simulation:
    """A controller on a machine, with a batch of equal requests."""

    def __init__(self, machine: Machine, batch: int = 1, controller: DraftController | None = None) -> None:
        self.machine = machine
        self.controller = controller or DraftController(machine.max_draft_len)
        self.requests: list[Request] = [toy.request([1] * 50, str(i)) for i in range(batch)]
        for request in self.requests:
            request.num_computed_tokens = 1000
        self.lengths: list[int] = []  # of the first request, step by step

    def run(self, steps: int, slow: Callable[[int], float] = lambda _: 1.0) -> float:
        """Tokens a second of one request. slow: what the time of a step is multiplied with besides."""
        seconds = tokens = 0.0
        for step in range(steps):
            choices = self.controller.choose(self.requests, beside_prompts=False)
            spent, committed = self._step(choices, slow(step))
            seconds, tokens = seconds + spent, tokens + committed
        return tokens / seconds / len(self.requests)

    def expected_rate(self, steps: int) -> float:
        """What the lengths of the last steps yield on average; all requests are taken to be like the first."""
        machine, lengths = self.machine, self.lengths[-steps:]
        tokens = sum(sum(machine.acceptance**j for j in range(length + 1)) for length in lengths)
        return tokens / sum(machine.draft_seconds(length) + machine.target_seconds([length]) for length in lengths)

    def first_lengths(self) -> list[int]:
        """Before anything is measured."""
        return [choice.num_tokens for choice in self.controller.choose(self.requests, beside_prompts=False)]

    def _step(self, choices: Sequence[DraftChoice], slow: float) -> tuple[float, int]:
        lengths = [choice.num_tokens for choice in choices]
        self.lengths.append(lengths[0])
        drafting = self.machine.draft_seconds(max(lengths)) * slow * self.machine.blur()
        if any(lengths):
            self.controller.drafted(0, [length for length in lengths if length], drafting)
        seconds = drafting + self.machine.target_seconds(lengths) * slow * self.machine.blur()
        rounds = [
            Round(request, choice, choice.num_tokens, self.machine.accepted(choice.num_tokens))
            for request, choice in zip(self.requests, choices, strict=True)
        ]
        self.controller.stepped(rounds, seconds, with_prompts=False)
        return seconds, sum(1 + each.num_accepted for each in rounds)
