"""How drafts come into the engine: one hand-off, `Engine.use(Drafting(...))`, and what is told back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from magicdec.runtime.engine.proposer import PlainProposer, Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftChoice, DraftPolicy, FixedDrafts


@dataclass(frozen=True)
class Round:
    """What became of one request's part of a step."""

    request: Request
    choice: DraftChoice  # as scheduled
    num_proposed: int
    num_accepted: int


class StepListener(Protocol):
    """Is told what became of drafts, and how long each step took."""

    def stepped(self, rounds: Sequence[Round], seconds: float, *, with_prompts: bool) -> None:
        """A step is over. seconds: all of it, drafting included. with_prompts: it read (parts of) prompts as well."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True)
class Drafting:
    """Who decides how much is drafted, who drafts, and who is told what became of it."""

    policy: DraftPolicy
    proposer: Proposer
    listener: StepListener | None = None


PLAIN: Final = Drafting(FixedDrafts(lambda _: 0), PlainProposer())
