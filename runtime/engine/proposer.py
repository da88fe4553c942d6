"""Proposers: who makes draft tokens. They return tokens and never change a request."""

from collections.abc import Sequence
from typing import Protocol

from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft


class Proposer(Protocol):
    """Makes drafts for the scheduled requests."""

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """One draft for each scheduled request, of at most its num_draft_tokens tokens."""
        ...

    def release(self, request: Request) -> None:
        """The request ended or was preempted: drop all that is held for it."""
        ...


class PlainProposer:
    """Proposes nothing: an engine for plain decoding only."""

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Empty drafts."""
        return [NO_DRAFT for _ in scheduled]

    def release(self, request: Request) -> None:
        """Nothing is held."""
