"""Seconds of a step's parts, as the engine measures them: the target's pass, and the drafts of each proposer.

Both are sums over a few features with costs that are never negative, fitted online by least squares of relative
errors. A slow outlier has little weight; observations fade as newer ones of the same draft length come, so the fit
follows a machine that changes and yet keeps what it knows of lengths that are rarely run. Before anything is measured a
prior says what is usual, relative to the target's fixed cost; it stays in force for what the observations leave open.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

MEMORY = 24  # observations of one draft length after which an old one has faded to 1 / e
LEAST_SECONDS = 1e-7  # a clock may stand still
LONG_MEMORY = 256  # the same for observations of any length
SHORT_MEMORY = 6
CHANGE = 0.1  # bias from which on the machine counts as changed, if it is also twice the usual error
FORGET = 0.8  # what observations still count after each one that shows a change
PRIOR_WEIGHT = 0.02  # of the prior for each cost, in observations
OUTLIER = 3.0  # relative errors beyond so many usual ones count less
LEAST_ERROR = 0.02  # usual relative error of a quiet machine
ROW_OF_ENTRY = 0.05  # an entry's cost for each draft row that looks at it, relative to reading it
PRIOR_ROWS = 64  # a pass over so many rows takes twice its fixed cost


class CostPrior(NamedTuple):
    """What passes read, which before any has been measured says best what they take; in reads of the target's weights.

    A proposer without a model has no pass: None.
    """

    kv_entry: float = 1 / 50_000  # one token's keys and values in the target's cache
    drafts: tuple[float | None, ...] = (0.25,)  # for each proposer, the weights of a pass
    window: float = 0.0  # the keys and values that a draft pass reads of one sequence


class LinearCost:
    """costs @ features = seconds; costs are at least 0. prior: costs in units that `scale` turns into seconds.

    scale: None until it is known; the first observation sets it.
    """

    def __init__(self, prior: Sequence[float], num_lengths: int) -> None:
        self.prior: Vector = np.array(prior)
        self.scale: float | None = None
        size = len(self.prior)
        self._squares = np.zeros((num_lengths, size, size))  # weighted sums for each draft length
        self._sums = np.zeros((num_lengths, size))
        self._weights = np.zeros(num_lengths)
        self._usual_error = 4 * LEAST_ERROR
        self._bias = 0.0  # of the last few relative errors
        self._fitted: Vector = self.prior
        self._changed = False
        self._is_first = True

    @property
    def costs(self) -> Vector:
        """Seconds of each feature; before any observation the prior's, in its own units if there is no scale."""
        if self._changed:
            self._fitted, self._changed = self._fit(), False
        return self._fitted

    @property
    def is_steady(self) -> bool:
        """Whether the last observations were about as expected: errors that stay on one side mean a change."""
        return abs(self._bias) <= max(CHANGE, 2 * self._usual_error)

    def set_scale(self, scale: float) -> None:
        """What the prior's unit is in seconds."""
        self.scale, self._changed = scale, True

    def seconds(self, features: Vector) -> float:
        """Predicted for these features."""
        return float(self.costs @ features)

    def observe(self, features: Vector, seconds: float, length: int) -> None:
        """A measured pass with drafts of about this length."""
        seconds = max(seconds, LEAST_SECONDS)
        if self._is_first:  # whatever runs for the first time takes longer: better than nothing, and no more
            self._is_first = False
            if self.scale is None:
                self.set_scale(seconds / float(self.prior @ features))
            return
        expected = max(float((self._fitted if self._weights.any() else self.costs) @ features), LEAST_SECONDS)
        weight, fading = self._judge(seconds / expected - 1)
        relative = features / expected
        for sums, new in (
            (self._squares, weight * np.outer(relative, relative)),
            (self._sums, weight * seconds / expected * relative),
            (self._weights, weight),
        ):
            own = min(fading, 1 - 1 / MEMORY) * sums[length] + new
            sums *= fading
            sums[length] = own
        self._changed = True

    def _judge(self, error: float) -> tuple[float, float]:
        """Weight of an observation with this relative error, and of what was known before it."""
        weight = min(1.0, OUTLIER * self._usual_error / max(abs(error), LEAST_ERROR))
        error = min(max(error, -1.0), 1.0)
        self._usual_error += (max(abs(error - self._bias), LEAST_ERROR) - self._usual_error) / MEMORY
        self._bias += (error - self._bias) / SHORT_MEMORY
        return weight, 1 - 1 / LONG_MEMORY if self.is_steady else FORGET

    def _fit(self) -> Vector:
        """Least squares with a weak pull to the prior, by as much as a feature counts; what would be negative is 0."""
        centre = self.prior * (self.scale or 1.0)
        squares, sums = self._squares.sum(0), self._sums.sum(0)
        pull = PRIOR_WEIGHT * np.where(
            squares.diagonal() > 0, squares.diagonal() / max(self._weights.sum(), 1e-9), centre**-2.0
        )
        squares, sums = squares + np.diag(pull), sums + pull * centre
        free = np.ones(len(centre), dtype=bool)
        while True:
            costs = np.zeros(len(centre))
            costs[free] = np.linalg.solve(squares[np.ix_(free, free)], sums[free])
            if (costs >= 0).all():
                return costs
            free &= costs >= 0


class TargetCost(LinearCost):
    """The target's pass, with everything of a step that is not drafting.

    Features of a step in which sequence i reads 1 + k_i rows over c_i entries of its cache: 1; sequences; sum of c_i;
    sum of k_i * c_i; and for each j the number of sequences with at least j drafts, since rows do not cost alike.
    """

    def __init__(self, max_draft_len: int, entry: float) -> None:
        row = 1 / PRIOR_ROWS
        super().__init__([1.0, row, entry, ROW_OF_ENTRY * entry, *([row] * max_draft_len)], max_draft_len + 1)
        self.max_draft_len = max_draft_len

    def features(self, lengths: Sequence[int], contexts: Sequence[int]) -> Vector:
        """Features of a step with these draft lengths and cache lengths."""
        k, c = np.array(lengths, dtype=np.int64), np.array(contexts, dtype=np.float64)
        at_least = len(k) - np.bincount(k, minlength=self.max_draft_len + 1).cumsum()[:-1]
        return np.concatenate([[1.0, len(k), c.sum(), k @ c], at_least])

    def base(self, contexts: Vector) -> float:
        """Seconds of the plain pass."""
        costs = self.costs
        return float(costs[0] + costs[1] * len(contexts) + costs[2] * contexts.sum())

    def draft_rows(self, contexts: Vector) -> Vector:
        """[B, max_draft_len + 1]: what 0, 1, ... draft rows of a sequence add."""
        costs = self.costs
        rows: Vector = np.concatenate([[0.0], costs[4:].cumsum()])
        table: Vector = rows + costs[3] * contexts[:, None] * np.arange(self.max_draft_len + 1)
        return table


class DraftCost(LinearCost):
    """One proposer's share of a step. Features: whether it runs; its passes; its rows over all passes.

    weights, window: of its prior. A proposer without a model (weights None) looks up; its prior is next to nothing.
    """

    def __init__(self, max_draft_len: int, weights: float | None, window: float) -> None:
        cost = 1e-3 if weights is None else weights
        super().__init__([0.1 * cost, cost, cost / PRIOR_ROWS + (window if weights else 0.0)], max_draft_len + 1)

    def features(self, lengths: Sequence[int]) -> Vector:
        """Features of drafts of these lengths, all above 0."""
        return np.array([1.0, max(lengths), sum(lengths)])
