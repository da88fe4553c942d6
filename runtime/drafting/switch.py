"""Several drafters in one engine: each request's drafts come from the one that the scheduler's plan names."""

from collections.abc import Callable, Sequence

from magicdec.runtime.engine.proposer import Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft

# Told after each drafter's work: which one, the draft lengths that it was asked for, and its seconds.
OnDrafted = Callable[[int, Sequence[int], float], None]


class Drafters:
    """A `Proposer` that hands each request to the drafter of its plan, and reports how long each drafter takes.

    A drafter that no request asks for does not run, so a step of plain decoding has nothing of speculation in it.
    """

    def __init__(self, proposers: Sequence[Proposer], on_drafted: OnDrafted, clock: Callable[[], float]) -> None:
        self.proposers = list(proposers)
        self._on_drafted = on_drafted
        self._clock = clock

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Each drafter's requests together."""
        drafts = [NO_DRAFT] * len(scheduled)
        for number, proposer in enumerate(self.proposers):
            mine = [i for i, entry in enumerate(scheduled) if entry.num_draft_tokens and entry.drafter == number]
            if not mine:
                continue
            start = self._clock()
            made = proposer.propose([scheduled[i] for i in mine])
            self._on_drafted(number, [scheduled[i].num_draft_tokens for i in mine], self._clock() - start)
            for i, draft in zip(mine, made, strict=True):
                drafts[i] = draft
        return drafts

    def release(self, request: Request) -> None:
        """Whoever drafted for it."""
        for proposer in self.proposers:
            proposer.release(request)
