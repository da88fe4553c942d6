"""How many tokens to draft for each request, and by which proposer: whatever commits the most tokens a second.

Every few steps the controller weighs what drafts are expected to bring (acceptance by position, of the request and of
all requests) against what they are expected to take (`cost_model`), for the batch as a whole. 0 is always among the
choices. Source: MagicDec (arXiv 2408.11049), equations 1 to 4, with acceptance by position in place of one rate.

What it looks at is committed tokens (how many of a round's drafts were accepted follows from draws at committed
positions alone) and time. It never sees draft tokens that were not committed, so the output's distribution is
untouched; see `sampling.draws`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from magicdec.runtime.drafting.cost_model import CostPrior
from magicdec.runtime.drafting.estimates import BatchView, Estimates
from magicdec.runtime.engine.drafting import Round
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftChoice

PLAN_EVERY = 4  # steps
LONGEST_PAUSE = 16  # steps between plans while nothing changes
MEASURE_EVERY = 4  # steps, while nothing changes: a measurement costs time as well
SWITCH_GAIN = 0.005  # a new plan must promise so much more than the one in force
PROBE_SHARE = 0.006  # of all time may be lost by trying what seems worse
MAX_CREDIT = 4.0  # steps' worth of time that may be saved up for probes
FIRST_CREDIT = 2.0  # the same at the start, when all is guessed
REST = 8  # steps before something is tried again


@dataclass
class _DraftPlan:
    """What is drafted until `next_step`. rate: tokens a second that it promises; pause: steps between two plans."""

    choices: dict[Request, DraftChoice] = field(default_factory=dict)
    rate: float = 0.0
    next_step: int = 0
    pause: int = PLAN_EVERY


class DraftController:
    """A `DraftPolicy` for requests that do not fix their draft length themselves.

    prior: what costs are taken to be until they are measured; its proposers stand in order of preference.
    """

    def __init__(self, max_draft_len: int, prior: CostPrior = CostPrior()) -> None:  # noqa: B008  immutable
        self.max_draft_len = max_draft_len
        self.known = Estimates(max_draft_len, prior)
        self._plans = _DraftPlan(), _DraftPlan()  # for steps of decoding alone, and for those that read prompts as well
        self._plan = self._plans[0]  # the one in force
        self._probe: DraftChoice | None = None  # instead of the plan, for one step
        self._probe_loss = 0.0  # seconds that it is expected to lose
        self._step = 0
        self._last_run: dict[DraftChoice, int] = {}
        self._credit: float | None = None  # seconds; None until a step has been measured
        self._drafting = 0.0  # seconds of this step
        self._expected = 0.0  # seconds of a step like the next one
        self._measures = True  # whether this step's times are taken in

    def choose(self, decoding: Sequence[Request], *, beside_prompts: bool) -> list[DraftChoice]:
        """Choose for each request of the next step."""
        free = [request for request in decoding if request.params.num_draft_tokens is None]
        self._probe, self._drafting, self._plan = None, 0.0, self._plans[beside_prompts]
        plan = self._plan
        if free and (self._step >= plan.next_step or any(request not in plan.choices for request in free)):
            view, before = BatchView(self.known, decoding, free, beside_prompts=beside_prompts), plan.choices
            self._make_plan(view)
            self._probe = self._find_probe(view)
            quiet = self._probe is None and plan.choices == before and self.known.is_steady
            plan.pause = min(2 * plan.pause, LONGEST_PAUSE) if quiet else PLAN_EVERY
            plan.next_step = self._step + plan.pause
            chosen = plan.choices.values() if self._probe is None else [self._probe] * len(free)
            self._expected = view.outcome(list(chosen))[1]
        settled = self._probe is None and plan.pause == LONGEST_PAUSE and self.known.is_steady
        self._measures = not settled or self._step % MEASURE_EVERY == 0
        return [self._own(request) or self._probe or plan.choices[request] for request in decoding]

    def drafted(self, proposer: int, lengths: Sequence[int], seconds: float) -> None:
        """One proposer has made drafts of these lengths, each above 0."""
        self._drafting += seconds
        if self._measures:
            cost = self.known.draft_costs[proposer]
            cost.observe(cost.features(lengths), seconds, _typical(lengths))
            self.known.share_scale()

    def stepped(self, rounds: Sequence[Round], seconds: float, *, with_prompts: bool) -> None:
        """A step is over. seconds: all of it, drafting included. with_prompts: it read (parts of) prompts as well."""
        target_seconds = seconds - self._drafting
        self._step += 1
        for each in rounds:
            self._learn(each)
        if self._measures and rounds and not with_prompts:  # else its time says nothing of decoding
            self._measure(rounds, target_seconds)
        self._account()

    def release(self, request: Request) -> None:
        """The request has ended."""
        for plan in self._plans:
            plan.choices.pop(request, None)
        for rates in self.known.rates:
            rates.forget(request)

    def _measure(self, rounds: Sequence[Round], target_seconds: float) -> None:
        lengths = [each.num_proposed for each in rounds]
        contexts = [each.request.num_computed_tokens for each in rounds]
        target = self.known.target
        target.observe(target.features(lengths, contexts), target_seconds, _typical(lengths))
        self.known.share_scale()

    def _own(self, request: Request) -> DraftChoice | None:
        own = request.params.num_draft_tokens
        return None if own is None else DraftChoice(min(own, self.max_draft_len))

    def _learn(self, each: Round) -> None:
        asked, proposer = each.choice
        if asked:
            offered = self.known.offered
            offered[proposer] += (each.num_proposed / asked - offered[proposer]) / 64
            self.known.rates[proposer].observe(each.request, asked, each.num_accepted)
            self._last_run[DraftChoice(asked, proposer)] = self._step
        else:
            self._last_run[DraftChoice(0)] = self._step

    def _account(self) -> None:
        """Time sets a share aside for probes, and a probe takes from it what it was expected to lose.

        Not what it did lose: that is chance for the most part, and what is found out is in the next estimate.
        """
        if self._credit is None:
            self._credit = FIRST_CREDIT * self._expected if self.known.target.scale is not None else None
        elif self._probe is None:
            self._credit = min(self._credit + PROBE_SHARE * self._expected, MAX_CREDIT * self._expected)
        else:
            self._credit -= self._probe_loss

    def _make_plan(self, view: BatchView) -> None:
        """The choices for the steps to come; those in force stay unless others promise more."""
        plan, best = self._plan, view.best()
        plan.rate = view.rate(best)
        old = [plan.choices[request] for request in view.free if request in plan.choices]
        if len(old) == len(best):
            old_rate = view.rate(old)
            if plan.rate < (1 + SWITCH_GAIN) * old_rate:
                best, plan.rate = old, old_rate
        plan.choices = dict(zip(view.free, best, strict=True))

    def _find_probe(self, view: BatchView) -> DraftChoice | None:
        """What has not run for long, and costs little to try, if there is credit for it."""
        if self._credit is None:
            return None
        found, self._probe_loss, most = None, 0.0, 0.0
        for choice in self._candidates(view):
            tokens, seconds = view.outcome([choice] * len(view.free))
            loss = max(seconds - tokens / self._plan.rate, 0.0)
            age = self._step - self._last_run.get(choice, -REST)
            worth = age / (loss + 0.01 * seconds)
            if age >= REST and worth > most and loss <= MAX_CREDIT / 2 * seconds:
                found, self._probe_loss, most = choice, loss, worth
        return found if self._probe_loss <= self._credit else None

    def _candidates(self, view: BatchView) -> Iterable[DraftChoice]:
        """What may turn out better than the plan: plain decoding, and lengths around those in force."""
        now = self._plan.choices[view.free[0]]
        lengths = {now.num_tokens + step for step in (-1, 1)} | {now.num_tokens // 2, 2 * now.num_tokens, 1}
        if now.num_tokens:
            yield DraftChoice(0)
        for proposer in range(len(self.known.draft_costs)):
            for length in sorted(lengths if proposer == now.proposer else {max(now.num_tokens, 2)}):
                if 1 <= length <= self.max_draft_len and DraftChoice(length, proposer) != now:
                    yield DraftChoice(length, proposer)


def _typical(lengths: Sequence[int]) -> int:
    return -(-sum(lengths) // len(lengths))
