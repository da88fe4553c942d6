"""One batch, and what drafts of each length are expected to bring it and to take.

Source: MagicDec (arXiv 2408.11049), equations 1 to 4, with acceptance by position in place of one rate.
"""

from collections.abc import Sequence

import numpy as np

from magicdec.runtime.drafting.acceptance_rates import LOOKUP_RATE, PRIOR_RATE, AcceptanceRates
from magicdec.runtime.drafting.cost_model import LEAST_SECONDS, CostPrior, DraftCost, TargetCost, Vector
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftChoice

ROUNDS = 5  # of the search for the best rate; it converges in two or three


class Estimates:
    """What is known of costs and acceptance. Lists are by proposer.

    has_model: whether a proposer runs a model, or looks up. offered: tokens that it gives for each it is asked for.
    """

    def __init__(self, max_draft_len: int, prior: CostPrior) -> None:
        self.max_draft_len = max_draft_len
        self.has_model = tuple(weights is not None for weights in prior.drafts)
        self.target = TargetCost(max_draft_len, prior.kv_entry)
        self.draft_costs = [DraftCost(max_draft_len, weights, prior.window) for weights in prior.drafts]
        self.rates = [AcceptanceRates(max_draft_len, PRIOR_RATE if model else LOOKUP_RATE) for model in self.has_model]
        self.offered = [1.0] * len(prior.drafts)

    @property
    def is_steady(self) -> bool:
        """Whether costs are what they were."""
        return self.target.is_steady and all(cost.is_steady for cost in self.draft_costs)

    def share_scale(self) -> None:
        """What one model has measured says in seconds what the prior of the others means; a look-up says nothing."""
        models = [cost for cost, model in zip(self.draft_costs, self.has_model, strict=True) if model]
        scale = next((cost.scale for cost in (self.target, *models) if cost.scale is not None), None)
        for cost in (self.target, *self.draft_costs):
            if cost.scale is None and scale is not None:
                cost.set_scale(scale)


class BatchView:
    """One batch as the estimates see it. Arrays are [free requests, max_draft_len + 1], by draft length.

    beside_prompts: the pass reads prompts as well, which have to be read in any case and pay for the weights.
    """

    def __init__(
        self, known: Estimates, decoding: Sequence[Request], free: Sequence[Request], *, beside_prompts: bool
    ) -> None:
        self.known = known
        self.free = free
        target, lengths = known.target, np.arange(known.max_draft_len + 1)
        contexts = np.array([request.num_computed_tokens for request in free], dtype=np.float64)
        rows = target.draft_rows(contexts)
        self.tokens = [rates.expected(free) for rates in known.rates]  # accepted draft tokens
        self.seconds = [  # of a request's own rows in the target and in the draft
            offered * rows + cost.costs[2] * lengths
            for cost, offered in zip(known.draft_costs, known.offered, strict=True)
        ]
        self.fixed_tokens, self.fixed_seconds = self._fixed(decoding)
        if beside_prompts:
            self.fixed_seconds -= target.costs[0]

    def best(self) -> list[DraftChoice]:
        """The choices with the most tokens a second, by Dinkelbach's method: at the best rate their surplus is 0."""
        best = [DraftChoice(0)] * len(self.free)
        rate = self.rate(best)
        for _ in range(ROUNDS):
            choices = self._best_at(rate)
            better = self.rate(choices)
            if better <= rate * (1 + 1e-6):
                break
            best, rate = choices, better
        return best

    def rate(self, choices: Sequence[DraftChoice]) -> float:
        """Tokens a second of the whole batch."""
        tokens, seconds = self.outcome(choices)
        return tokens / seconds

    def outcome(self, choices: Sequence[DraftChoice]) -> tuple[float, float]:
        """Expected tokens, and seconds, of a step with these choices for the free requests."""
        tokens, seconds = self.fixed_tokens + len(choices), self.fixed_seconds
        longest = [0] * len(self.tokens)
        for i, (length, proposer) in enumerate(choices):
            tokens += self.tokens[proposer][i, length]
            seconds += self.seconds[proposer][i, length]
            longest[proposer] = max(longest[proposer], length)
        for cost, length in zip(self.known.draft_costs, longest, strict=True):
            if length:
                seconds += cost.costs[0] + cost.costs[1] * length
        return tokens, max(seconds, LEAST_SECONDS)

    def _best_at(self, rate: float) -> list[DraftChoice]:
        """The largest surplus of tokens over what their time is worth; one proposer runs its model at most."""
        lookups = [i for i, model in enumerate(self.known.has_model) if not model]
        surplus, choices = np.zeros(len(self.free)), [DraftChoice(0)] * len(self.free)
        for proposer in lookups:
            own = self._surplus(proposer, rate)
            own -= rate * self.known.draft_costs[proposer].costs[1] * np.arange(own.shape[1])
            surplus, choices = _better(surplus, choices, own, proposer)
        most, found = surplus.sum(), choices
        for proposer, cost in enumerate(self.known.draft_costs):
            if proposer in lookups:
                continue
            own = self._surplus(proposer, rate)
            upto = np.maximum(np.maximum.accumulate(own, axis=1), surplus[:, None]).sum(axis=0)
            upto -= rate * (cost.costs[0] + cost.costs[1] * np.arange(len(upto)))
            longest = int(upto[1:].argmax()) + 1
            if upto[longest] > most:
                most, found = upto[longest], _better(surplus, choices, own[:, : longest + 1], proposer)[1]
        return found

    def _surplus(self, proposer: int, rate: float) -> Vector:
        surplus: Vector = self.tokens[proposer] - rate * self.seconds[proposer]
        return surplus

    def _fixed(self, decoding: Sequence[Request]) -> tuple[float, float]:
        """Tokens and seconds of requests with a length of their own, and of everybody's plain rows."""
        contexts = np.array([request.num_computed_tokens for request in decoding], dtype=np.float64)
        seconds, tokens = self.known.target.base(contexts), 0.0
        own = [r for r in decoding if r.params.num_draft_tokens is not None]
        if own:
            lengths = [min(r.params.num_draft_tokens or 0, self.known.max_draft_len) for r in own]
            picked = np.arange(len(own)), lengths
            tokens = len(own) + float(self.known.rates[0].expected(own)[picked].sum())
            rows = self.known.target.draft_rows(np.array([r.num_computed_tokens for r in own], dtype=np.float64))
            seconds += float(rows[picked].sum())
            if any(lengths):
                cost = self.known.draft_costs[0]
                seconds += cost.seconds(cost.features([length for length in lengths if length]))
        return tokens, seconds


def _better(
    surplus: Vector, choices: list[DraftChoice], own: Vector, proposer: int
) -> tuple[Vector, list[DraftChoice]]:
    """For each request this proposer's best length, where that is better than its choice so far."""
    lengths = own.argmax(axis=1)
    most = own[np.arange(len(own)), lengths]
    gains = most > surplus
    picked = [
        DraftChoice(int(length), proposer) if gain else choice
        for gain, length, choice in zip(gains, lengths, choices, strict=True)
    ]
    return np.where(gains, most, surplus), picked
