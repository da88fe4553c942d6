"""How often draft tokens are accepted: by position, of each request, with what all requests have in common as prior."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from magicdec.runtime.engine.request import Request

PRIOR_RATE = 0.75  # of a draft by a model
LOOKUP_RATE = 0.3  # of one that was looked up
OWN_MEMORY = 32  # trials of one position after which an old one has faded to 1 / e
SHARED_MEMORY = 64
SHORT_MEMORY = 16  # the same for the error of the shared rates
CHANGE = 3.0  # standard deviations of that error from which on the text counts as another one
FORGET = 0.8  # what trials still count after each one that shows a change
LEAST_VARIANCE = 0.05  # of a trial: nothing is certain
SHARED_WEIGHT = 12.0  # of the shared rate, in trials of the request's own
ALIKE_WEIGHT = 4.0  # of the request's rate at the position before, in trials of all requests
PRIOR_WEIGHT = 1.0  # of the rate of the position before, in trials of all requests

_Counts = tuple[list[float], list[float]]  # by position: trials, and how many of them were accepted


class AcceptanceRates:
    """How often one proposer's drafts are accepted.

    The rate of position j is that of draft token j + 1 given that those before it were accepted.
    """

    def __init__(self, max_draft_len: int, prior: float = PRIOR_RATE) -> None:
        self.prior = prior
        self._new = [0.0] * max_draft_len
        self._shared: _Counts = (self._new.copy(), self._new.copy())
        self._own: dict[Request, _Counts] = {}
        self._error = self._variance = 0.0  # of the last trials against the shared rates

    def observe(self, request: Request, num_asked: int, num_accepted: int) -> None:
        """A round; what a proposer was asked for and did not propose was not accepted either."""
        own = self._own.setdefault(request, (self._new.copy(), self._new.copy()))
        trials, accepted = self._shared
        for j in range(min(num_accepted + 1, num_asked)):
            kept = j < num_accepted
            self._judge(kept, (accepted[j] + PRIOR_WEIGHT * self.prior) / (trials[j] + PRIOR_WEIGHT))
            _count(own, j, kept, 1 - 1 / OWN_MEMORY)
            _count(self._shared, j, kept, FORGET if self._has_changed else 1 - 1 / SHARED_MEMORY)

    @property
    def _has_changed(self) -> bool:
        """Whether the last trials err to one side by more than chance explains."""
        return self._error**2 > CHANGE**2 * self._variance

    def _judge(self, kept: bool, rate: float) -> None:
        """One trial where this rate was expected. Errors and their variance are running means of SHORT_MEMORY."""
        self._error += (kept - rate - self._error) / SHORT_MEMORY
        fading = (1 - 1 / SHORT_MEMORY) ** 2
        self._variance = fading * self._variance + max(rate * (1 - rate), LEAST_VARIANCE) / SHORT_MEMORY**2

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._own.pop(request, None)

    def expected(self, requests: Sequence[Request]) -> NDArray[np.float64]:
        """[B, max_draft_len + 1]: accepted tokens that a draft of 0, 1, ... tokens is expected to bring."""
        nothing = (self._new, self._new)
        own = np.array([self._own.get(request, nothing) for request in requests])  # [B, 2, max_draft_len]
        expected = np.zeros((len(requests), len(self._new) + 1))
        before, reached, shared = np.full(len(requests), self.prior), np.ones(len(requests)), self.prior
        for j, (trials, accepted) in enumerate(zip(*self._shared, strict=True)):
            shared = (accepted + PRIOR_WEIGHT * shared) / (trials + PRIOR_WEIGHT)
            prior = before if j else shared  # a request's positions are alike, until others say how they differ
            prior = (trials * shared + ALIKE_WEIGHT * prior) / (trials + ALIKE_WEIGHT)
            before = (own[:, 1, j] + SHARED_WEIGHT * prior) / (own[:, 0, j] + SHARED_WEIGHT)
            reached = reached * before
            expected[:, j + 1] = expected[:, j] + reached
        return expected


def _count(counts: _Counts, position: int, kept: bool, fading: float) -> None:
    trials, accepted = counts
    trials[position] = fading * trials[position] + 1
    accepted[position] = fading * accepted[position] + kept
