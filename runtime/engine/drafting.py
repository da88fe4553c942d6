"""How drafts come into the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftChoice, DraftPolicy


@dataclass(frozen=True)
class Round:
    """What became of one request's part of a step."""

    request: Request
    choice: DraftChoice  # as scheduled
    num_proposed: int
    num_accepted: int


class StepListener(DraftPolicy, Protocol):
    """Wants to know what became of drafts, and how long a step took."""

    def stepped(self, rounds: Sequence[Round], seconds: float, *, with_prompts: bool) -> None:
        """A step is over. seconds: all of it, drafting included. with_prompts: it read (parts of) prompts as well."""
        ...

    def release(self, request: Request) -> None:
        """The request has ended."""
        ...
