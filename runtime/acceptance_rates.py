"""How often draft tokens are accepted: by position, of each request, with what all requests have in common as prior."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from magicdec.runtime.request import Request

PRIOR_RATE = 0.75  # of a draft by a model
LOOKUP_RATE = 0.3  # of one that was looked up
OWN_MEMORY = 32  # trials of one position after which an old one has faded to 1 / e
SHARED_MEMORY = 128
SHARED_WEIGHT = 12.0  # of the shared rate, in trials of the request's own
ALIKE_WEIGHT = 4.0  # of the request's rate at the position before, in trials of all requests
PRIOR_WEIGHT = 1.0  # of the rate of the position before, in trials of all requests

_Counts = tuple[list[float], list[float]]  # by position: trials, and how many of them were accepted


class AcceptanceRates:
    """Of one drafter. The rate of position j is that of draft token j + 1 given that those before it were accepted."""

    def __init__(self, max_draft_len: int, prior: float = PRIOR_RATE) -> None:
        self.prior = prior
        self._new = [0.0] * max_draft_len
        self._shared: _Counts = (self._new.copy(), self._new.copy())
        self._own: dict[Request, _Counts] = {}

    def observe(self, request: Request, num_asked: int, num_accepted: int) -> None:
        """A round; what a drafter was asked for and did not propose was not accepted either."""
        own = self._own.setdefault(request, (self._new.copy(), self._new.copy()))
        for (trials, accepted), memory in ((self._shared, SHARED_MEMORY), (own, OWN_MEMORY)):
            fading = 1 - 1 / memory
            for j in range(min(num_accepted + 1, num_asked)):
                trials[j] = fading * trials[j] + 1
                accepted[j] = fading * accepted[j] + (j < num_accepted)

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
