"""How many tokens to draft for each request, and by which drafter: whatever commits the most tokens a second.

Every few steps the controller weighs what drafts are expected to bring (acceptance by position, of the request and of
all requests) against what they are expected to take (`cost_model`), for the batch as a whole. 0 is always among the
choices. Source: MagicDec (arXiv 2408.11049), equations 1 to 4, with acceptance by position in place of one rate.

What it looks at is committed tokens (how many of a round's drafts were accepted follows from draws at committed
positions alone) and time. It never sees draft tokens that were not committed, so the output's law is untouched; see
`draws`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from magicdec.runtime.acceptance_rates import LOOKUP_RATE, PRIOR_RATE, AcceptanceRates
from magicdec.runtime.cost_model import LEAST_SECONDS, CostPrior, DraftCost, TargetCost, Vector
from magicdec.runtime.request import Request
from magicdec.runtime.scheduler import DraftChoice

PLAN_EVERY = 4  # steps
LONGEST_PAUSE = 16  # steps between plans while nothing changes
MEASURE_EVERY = 4  # steps, while nothing changes: a measurement costs time as well
SWITCH_GAIN = 0.005  # a new plan must promise so much more than the one in force
PROBE_SHARE = 0.003  # of all time may be lost by trying what seems worse
MAX_CREDIT = 4.0  # steps' worth of time that may be saved up for probes
FIRST_CREDIT = 0.5  # the same at the start
REST = 8  # steps before something is tried again
ROUNDS = 5  # of the search for the best rate; it converges in two or three


@dataclass(frozen=True)
class Round:
    """What became of one request's part of a step."""

    request: Request
    choice: DraftChoice  # as scheduled
    num_proposed: int
    num_accepted: int


class DraftController:
    """A `DraftPolicy` for requests that do not fix their draft length themselves.

    prior: what costs are taken to be until they are measured; its drafters stand in order of preference.
    """

    def __init__(self, max_draft_len: int, prior: CostPrior = CostPrior()) -> None:  # noqa: B008  immutable
        self.max_draft_len = max_draft_len
        self.has_model = tuple(weights is not None for weights in prior.drafts)
        self.target = TargetCost(max_draft_len, prior.kv_entry)
        self.drafters = [DraftCost(max_draft_len, weights, prior.window) for weights in prior.drafts]
        self.rates = [AcceptanceRates(max_draft_len, PRIOR_RATE if model else LOOKUP_RATE) for model in self.has_model]
        self._offered = [1.0] * len(prior.drafts)  # tokens that a drafter gives for each one that it is asked for
        self._plan: dict[Request, DraftChoice] = {}
        self._rate = 0.0  # tokens a second that it promises
        self._probe: DraftChoice | None = None  # instead of the plan, for one step
        self._probe_loss = 0.0  # seconds that it is expected to lose
        self._step = 0
        self._next_plan, self._pause = 0, PLAN_EVERY
        self._last_run: dict[DraftChoice, int] = {}
        self._credit: float | None = None  # seconds; None until a step has been measured
        self._drafting = 0.0  # seconds of this step
        self._expected = 0.0  # seconds of a step like the next one
        self._measures = True  # whether this step's times are taken in

    def choose(self, decoding: Sequence[Request]) -> list[DraftChoice]:
        """For each request of the next step."""
        free = [request for request in decoding if request.params.num_draft_tokens is None]
        self._probe, self._drafting = None, 0.0
        if free and (self._step >= self._next_plan or any(request not in self._plan for request in free)):
            view, before = _View(self, decoding, free), self._plan
            self._make_plan(view)
            self._probe = self._find_probe(view)
            quiet = self._probe is None and self._plan == before
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if quiet else PLAN_EVERY
            self._next_plan = self._step + self._pause
            chosen = self._plan.values() if self._probe is None else [self._probe] * len(free)
            self._expected = view.outcome(list(chosen))[1]
        settled = self._probe is None and self._pause == LONGEST_PAUSE
        self._measures = not settled or self._step % MEASURE_EVERY == 0
        return [self._own(request) or self._probe or self._plan[request] for request in decoding]

    def drafted(self, drafter: int, lengths: Sequence[int], seconds: float) -> None:
        """One drafter has made drafts of these lengths, each above 0."""
        self._drafting += seconds
        if self._measures:
            cost = self.drafters[drafter]
            cost.observe(cost.features(lengths), seconds, _typical(lengths))

    def stepped(self, rounds: Sequence[Round], seconds: float, *, with_prompts: bool) -> None:
        """A step is over. seconds: all of it, drafting included. with_prompts: it read (parts of) prompts as well."""
        target_seconds = seconds - self._drafting
        self._step += 1
        for each in rounds:
            self._learn(each)
        if not rounds or with_prompts:
            if self._probe is not None and self._credit is not None:
                self._credit -= self._probe_loss
            return
        if self._measures:
            self._measure(rounds, target_seconds)
        self._account(seconds, sum(1 + each.num_accepted for each in rounds))

    def release(self, request: Request) -> None:
        """The request has ended."""
        self._plan.pop(request, None)
        for rates in self.rates:
            rates.forget(request)

    def _measure(self, rounds: Sequence[Round], target_seconds: float) -> None:
        lengths = [each.num_proposed for each in rounds]
        contexts = [each.request.num_computed_tokens for each in rounds]
        self.target.observe(self.target.features(lengths, contexts), target_seconds, _typical(lengths))
        for cost in self.drafters:
            if cost.scale is None and self.target.scale is not None:
                cost.set_scale(self.target.scale)

    def _own(self, request: Request) -> DraftChoice | None:
        own = request.params.num_draft_tokens
        return None if own is None else DraftChoice(min(own, self.max_draft_len))

    def _learn(self, each: Round) -> None:
        asked, drafter = each.choice
        if asked:
            self._offered[drafter] += (each.num_proposed / asked - self._offered[drafter]) / 64
            self.rates[drafter].observe(each.request, asked, each.num_accepted)
            self._last_run[DraftChoice(asked, drafter)] = self._step
        else:
            self._last_run[DraftChoice(0)] = self._step

    def _account(self, seconds: float, num_tokens: int) -> None:
        """Time sets a share aside for probes; a probe takes from it what it lost, or adds what it gained.

        What gained is tried again at once: an estimate that is out of date is mended in one go.
        """
        expected = self._expected or seconds
        seconds = min(max(seconds, LEAST_SECONDS), 2 * expected)  # what is slow once is no reason to probe, or not to
        if self._credit is None:
            self._credit = FIRST_CREDIT * seconds
        if self._probe is None:
            self._credit = min(self._credit + PROBE_SHARE * seconds, MAX_CREDIT * expected)
            return
        loss = seconds - num_tokens / self._rate
        self._credit -= loss
        if loss < 0:
            self._last_run[self._probe] = self._step - REST

    def _make_plan(self, view: "_View") -> None:
        """The choices for the steps to come; those in force stay unless others promise more."""
        best = view.best()
        self._rate = view.rate(best)
        old = [self._plan[request] for request in view.free if request in self._plan]
        if len(old) == len(best):
            old_rate = view.rate(old)
            if self._rate < (1 + SWITCH_GAIN) * old_rate:
                best, self._rate = old, old_rate
        self._plan = dict(zip(view.free, best, strict=True))

    def _find_probe(self, view: "_View") -> DraftChoice | None:
        """What has not run for long, and costs little to try, if there is credit for it."""
        if self._credit is None:
            return None
        found, self._probe_loss, most = None, 0.0, 0.0
        for choice in self._candidates(view):
            tokens, seconds = view.outcome([choice] * len(view.free))
            loss = max(seconds - tokens / self._rate, 0.0)
            age = self._step - self._last_run.get(choice, -REST)
            worth = age / (loss + 0.01 * seconds)
            if age >= REST and worth > most and loss <= MAX_CREDIT / 2 * seconds:
                found, self._probe_loss, most = choice, loss, worth
        return found if self._probe_loss <= self._credit else None

    def _candidates(self, view: "_View") -> Iterable[DraftChoice]:
        """What may turn out better than the plan: plain decoding, and lengths around those in force."""
        now = self._plan[view.free[0]]
        lengths = {now.num_tokens + step for step in (-1, 1)} | {now.num_tokens // 2, 2 * now.num_tokens, 1}
        if now.num_tokens:
            yield DraftChoice(0)
        for drafter in range(len(self.drafters)):
            for length in sorted(lengths if drafter == now.drafter else {max(now.num_tokens, 2)}):
                if 1 <= length <= self.max_draft_len and DraftChoice(length, drafter) != now:
                    yield DraftChoice(length, drafter)


class _View:
    """One batch as the estimates see it. Arrays are [free requests, max_draft_len + 1], by draft length."""

    def __init__(self, controller: DraftController, decoding: Sequence[Request], free: Sequence[Request]) -> None:
        self.controller = controller
        self.free = free
        target, lengths = controller.target, np.arange(controller.max_draft_len + 1)
        contexts = np.array([request.num_computed_tokens for request in free], dtype=np.float64)
        rows = target.draft_rows(contexts)
        self.tokens = [rates.expected(free) for rates in controller.rates]  # accepted draft tokens
        self.seconds = [  # of a request's own rows in the target and in the draft
            offered * rows + cost.costs[2] * lengths
            for cost, offered in zip(controller.drafters, controller._offered, strict=True)
        ]
        self.fixed_tokens, self.fixed_seconds = self._fixed(decoding)

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
        for i, (length, drafter) in enumerate(choices):
            tokens += self.tokens[drafter][i, length]
            seconds += self.seconds[drafter][i, length]
            longest[drafter] = max(longest[drafter], length)
        for cost, length in zip(self.controller.drafters, longest, strict=True):
            if length:
                seconds += cost.costs[0] + cost.costs[1] * length
        return tokens, max(seconds, LEAST_SECONDS)

    def _best_at(self, rate: float) -> list[DraftChoice]:
        """The largest surplus of tokens over what their time is worth; one drafter runs its model at most."""
        lookups = [i for i, model in enumerate(self.controller.has_model) if not model]
        surplus, choices = np.zeros(len(self.free)), [DraftChoice(0)] * len(self.free)
        for drafter in lookups:
            own = self._surplus(drafter, rate)
            own -= rate * self.controller.drafters[drafter].costs[1] * np.arange(own.shape[1])
            surplus, choices = _better(surplus, choices, own, drafter)
        most, found = surplus.sum(), choices
        for drafter, cost in enumerate(self.controller.drafters):
            if drafter in lookups:
                continue
            own = self._surplus(drafter, rate)
            upto = np.maximum(np.maximum.accumulate(own, axis=1), surplus[:, None]).sum(axis=0)
            upto -= rate * (cost.costs[0] + cost.costs[1] * np.arange(len(upto)))
            longest = int(upto[1:].argmax()) + 1
            if upto[longest] > most:
                most, found = upto[longest], _better(surplus, choices, own[:, : longest + 1], drafter)[1]
        return found

    def _surplus(self, drafter: int, rate: float) -> Vector:
        surplus: Vector = self.tokens[drafter] - rate * self.seconds[drafter]
        return surplus

    def _fixed(self, decoding: Sequence[Request]) -> tuple[float, float]:
        """Tokens and seconds of requests with a length of their own, and of everybody's plain rows."""
        contexts = np.array([request.num_computed_tokens for request in decoding], dtype=np.float64)
        seconds, tokens = self.controller.target.base(contexts), 0.0
        own = [r for r in decoding if r.params.num_draft_tokens is not None]
        if own:
            lengths = [min(r.params.num_draft_tokens or 0, self.controller.max_draft_len) for r in own]
            picked = np.arange(len(own)), lengths
            tokens = len(own) + float(self.controller.rates[0].expected(own)[picked].sum())
            rows = self.controller.target.draft_rows(np.array([r.num_computed_tokens for r in own], dtype=np.float64))
            seconds += float(rows[picked].sum())
            if any(lengths):
                cost = self.controller.drafters[0]
                seconds += cost.seconds(cost.features([length for length in lengths if length]))
        return tokens, seconds


def _better(surplus: Vector, choices: list[DraftChoice], own: Vector, drafter: int) -> tuple[Vector, list[DraftChoice]]:
    """For each request this drafter's best length, where that is better than its choice so far."""
    lengths = own.argmax(axis=1)
    most = own[np.arange(len(own)), lengths]
    gains = most > surplus
    picked = [
        DraftChoice(int(length), drafter) if gain else choice
        for gain, length, choice in zip(gains, lengths, choices, strict=True)
    ]
    return np.where(gains, most, surplus), picked


def _typical(lengths: Sequence[int]) -> int:
    return -(-sum(lengths) // len(lengths))
