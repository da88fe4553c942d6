"""Several proposers in one engine: each request's drafts come from the one that the scheduler's plan names."""

from collections.abc import Callable, Sequence

from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.proposer import Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft

# Told after each proposer's work: which one, the draft lengths that it was asked for, and its seconds.
OnDrafted = Callable[[int, Sequence[int], float], None]


class ProposerSwitch:
    """A `Proposer` that hands each request to the proposer of its plan, and reports how long each proposer takes.

    A proposer that no request asks for does not run, so a step of plain decoding has nothing of speculation in it.
    """

    def __init__(self, proposers: Sequence[Proposer], on_drafted: OnDrafted, clock: Callable[[], float]) -> None:
        self.proposers = list(proposers)
        self._on_drafted = on_drafted
        self._clock = clock

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Each proposer's requests together."""
        drafts = [NO_DRAFT] * len(scheduled)
        for number, proposer in enumerate(self.proposers):
            mine = [i for i, entry in enumerate(scheduled) if entry.num_draft_tokens and entry.proposer == number]
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


def controlled(controller: DraftController, proposers: Sequence[Proposer], clock: Callable[[], float]) -> Drafting:
    """Drafting whose lengths and proposers one controller chooses, by the seconds that this clock says they take."""
    return Drafting(controller, ProposerSwitch(proposers, controller.drafted, clock), controller)
