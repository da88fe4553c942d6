"""Simulated machines: the controller comes close to the best fixed choice, follows changes, and probes cheaply."""

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from magicdec.runtime.drafting.acceptance_rates import AcceptanceRates
from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.drafting.cost_model import CostPrior, DraftCost, LinearCost, TargetCost
from magicdec.runtime.engine.drafting import Round
from magicdec.runtime.engine.scheduler import DraftChoice
from tests.runtime.drafting.simulation import PLAIN_SECONDS, Machine, Simulation
from tests.support import toy

DRAFTS, VERIFIES, RATES = (0.1, 0.4, 1.2), (1.0, 1.5, 3.0), (0.1, 0.5, 0.8, 0.98)
GRID = list(itertools.product(DRAFTS, VERIFIES, RATES))


def _share_of_best(machine: Machine, batch: int, steps: int) -> float:
    simulation = Simulation(machine, batch)
    simulation.run(100 + steps)
    return simulation.expected_rate(steps) / machine.best()[0]


@pytest.mark.parametrize(("batch", "steps"), [(1, 900), (8, 300)])
@pytest.mark.parametrize("point", GRID, ids=str)
def test_nearly_as_fast_as_the_best_fixed_length(point: tuple[float, float, float], batch: int, steps: int) -> None:
    """Plain decoding included; over costs and acceptance of all kinds, after a hundred steps to learn them."""
    assert _share_of_best(Machine(*point), batch, steps) >= 0.97


@pytest.mark.parametrize("bend", [0.5, 2.0])
def test_verification_need_not_grow_evenly(bend: float) -> None:
    for point in ((0.1, 3.0, 0.8), (0.1, 1.5, 0.5), (0.4, 3.0, 0.98), (1.2, 1.5, 0.8)):
        assert _share_of_best(Machine(*point, bend=bend), 8, 1000) >= 0.95, point


CHANGES: dict[str, tuple[str, float, float]] = {
    "acceptance rises": ("acceptance", 0.1, 0.95),
    "acceptance falls": ("acceptance", 0.95, 0.1),
    "verification gets dearer": ("verify", 1.2, 4.0),
    "verification gets cheaper": ("verify", 4.0, 1.2),
    "drafts get dearer": ("draft", 0.1, 1.2),
    "drafts get cheaper": ("draft", 1.2, 0.1),
}


def _after_a_change(name: str) -> float:
    field, before, after = CHANGES[name]
    machine = Machine(0.3, 1.5, 0.85)
    setattr(machine, field, before)
    simulation = Simulation(machine, batch=4)
    simulation.run(600)
    setattr(machine, field, after)
    simulation.run(900)
    return simulation.expected_rate(300) / machine.best()[0]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_followed(name: str) -> None:
    """Some hundred steps later the choice is right again."""
    assert _after_a_change(name) >= 0.95


@pytest.mark.parametrize("machine", [(0.3, 1.5, 0.85), (1.2, 3.0, 0.3)], ids=["speculative", "plain"])
def test_probes_cost_less_than_a_percent(machine: tuple[float, float, float]) -> None:
    """And yet there are some, at plain decoding's length and at others."""
    simulation = Simulation(Machine(*machine, noise=0.0), batch=16)
    simulation.run(300)
    settled = statistics.mode(simulation.lengths[-50:])
    simulation.run(3000)
    assert simulation.expected_rate(3000) / simulation.machine.best()[0] > 0.985
    probes = [length for length in simulation.lengths[-3000:] if length != settled]
    assert len(probes) >= 5
    assert 0 in probes or settled == 0


def test_probes_beside_prompts_are_paid_for_as_well() -> None:
    """Such a step's time says nothing of decoding; what a probe was expected to lose in it still counts."""
    simulation = Simulation(Machine(1.2, 3.0, 0.3), batch=4)
    simulation.run(300)
    simulation.controller._credit = 5 * PLAIN_SECONDS
    before = len(simulation.lengths)
    for _ in range(2000):
        choices = simulation.controller.choose(simulation.requests, beside_prompts=True)
        lengths = [choice.num_tokens for choice in choices]
        simulation.lengths.append(lengths[0])
        rounds = list(map(Round, simulation.requests, choices, lengths, [0] * 4))
        simulation.controller.stepped(rounds, 1.0, with_prompts=True)
    assert sum(length > 0 for length in simulation.lengths[before:]) < 20


@pytest.mark.parametrize(("fixed", "per_request", "drafts_beside"), [(0.02, 0.0002, False), (0.002, 0.02, True)])
def test_beside_prompts_the_weights_are_read_in_any_case(fixed: float, per_request: float, drafts_beside: bool) -> None:
    """Drafts that spare passes over the weights spare nothing there; those that spare passes over long contexts do."""
    controller, requests = DraftController(8), [toy.request([1] * 9, str(i)) for i in range(4)]
    machine = Machine(0.1, 1.0, 0.8)
    for step in range(200):
        running = requests if step % 5 else requests[:2]  # what a request costs is seen where their number changes
        choices = controller.choose(running, beside_prompts=False)
        lengths = [choice.num_tokens for choice in choices]
        if any(lengths):
            controller.drafted(0, [length for length in lengths if length], 0.002 * max(lengths))
        rounds = [
            Round(r, c, c.num_tokens, machine.accepted(c.num_tokens)) for r, c in zip(running, choices, strict=True)
        ]
        seconds = fixed + per_request * len(rounds) + 0.002 * max(lengths)
        controller.stepped(rounds, seconds, with_prompts=False)
    for beside_prompts, drafts in ((False, True), (True, drafts_beside)):
        controller.choose(requests, beside_prompts=beside_prompts)  # what comes back may be a probe
        plan = controller._plans[beside_prompts].choices.values()
        assert all((choice.num_tokens > 0) is drafts for choice in plan)


def test_a_draft_says_what_the_target_costs_until_that_is_measured() -> None:
    """While every step reads prompts, only drafts are timed."""
    controller, request = DraftController(8, CostPrior(drafts=(0.25, None))), toy.request([1] * 9)
    controller.choose([request], beside_prompts=True)
    controller.drafted(1, [4], 0.01)  # a look-up, which is no measure of anything else
    assert controller.known.target.scale is None
    controller.drafted(0, [4], 0.02)
    controller.stepped([Round(request, DraftChoice(4), 4, 1)], 1.0, with_prompts=True)
    assert controller.known.target.costs[0] == pytest.approx(0.02, rel=0.2)


def test_one_slow_step_changes_nothing() -> None:
    """200 times as slow: but for a few probes the lengths stay about what they were."""
    for slow in (5, 6, 7, 8):  # one in four is measured
        simulation = Simulation(Machine(0.3, 1.5, 0.85), batch=4)
        simulation.run(200)
        settled = statistics.mode(simulation.lengths[-20:])
        simulation.run(60, slow=lambda step, slow=slow: 200.0 if step == slow else 1.0)  # type: ignore[misc]
        assert sum(abs(length - settled) <= 1 for length in simulation.lengths[-60 + slow + 1 :]) >= 46


def test_first_choices_are_sane() -> None:
    """Before anything is measured: longer drafts for few sequences than for many."""
    few, many = (Simulation(Machine(0.3, 1.5, 0.8), batch).first_lengths() for batch in (1, 64))
    assert all(3 <= length <= 6 for length in few)
    assert all(1 <= length <= 3 for length in many)


def test_lengths_follow_each_requests_own_acceptance() -> None:
    """One request whose drafts are always accepted, beside others whose drafts never are."""
    controller, requests = DraftController(8), [toy.request([1] * 9, str(i)) for i in range(4)]
    machine = Machine(0.1, 1.5, 1.0)
    for _ in range(150):
        choices = controller.choose(requests, beside_prompts=False)
        lengths = [choice.num_tokens for choice in choices]
        if any(lengths):
            controller.drafted(0, [length for length in lengths if length], machine.draft_seconds(max(lengths)))
        accepted = [lengths[0], 0, 0, 0]
        rounds = list(map(Round, requests, choices, lengths, accepted))
        seconds = machine.target_seconds(lengths) + machine.draft_seconds(max(lengths))
        controller.stepped(rounds, seconds, with_prompts=False)
    assert [choice.num_tokens >= 6 for choice in choices] == [True, False, False, False]


def test_the_faster_drafter_is_chosen() -> None:
    """A look-up that costs nothing against a model, by what each has accepted."""
    for lookup_rate, wanted in ((0.9, 1), (0.05, 0)):
        machine = Machine(0.3, 1.3, 0.8)
        controller, request = DraftController(8, CostPrior(drafts=(0.25, None))), toy.request([1] * 9)
        used = []
        for _ in range(600):
            (choice,) = controller.choose([request], beside_prompts=False)
            length, drafter = choice
            machine.acceptance = lookup_rate if drafter else 0.8
            seconds = 1e-5 if drafter else machine.draft_seconds(length)
            if length:
                controller.drafted(drafter, [length], seconds)
            done = Round(request, choice, length, machine.accepted(length))
            controller.stepped([done], seconds + machine.target_seconds([length]), with_prompts=False)
            used.append(drafter if length else None)
        assert used[-200:].count(wanted) > 180


def test_a_requests_own_length_wins() -> None:
    own = [toy.request([1] * 9, str(length), num_draft_tokens=length) for length in (0, 2, 99)]
    controller = DraftController(8)
    choices = controller.choose([*own, toy.request([1] * 9, "free")], beside_prompts=False)
    assert choices[:3] == [DraftChoice(0), DraftChoice(2), DraftChoice(8)]


def test_what_a_request_needed_is_forgotten_with_it() -> None:
    simulation = Simulation(Machine(0.3, 1.5, 0.8), batch=4)
    simulation.run(20)
    for request in simulation.requests:
        simulation.controller.release(request)
    assert [plan.choices for plan in simulation.controller._plans] == [{}, {}]
    assert [rates._own for rates in simulation.controller.known.rates] == [{}]


def test_acceptance_by_position() -> None:
    """Always the first, never the second."""
    rates, request = AcceptanceRates(4), toy.request([1])
    for _ in range(400):
        rates.observe(request, 3, 1)
    (expected,) = rates.expected([request])
    assert expected == pytest.approx([0, 1, 1, 1, 1], abs=0.12)
    assert rates.expected([toy.request([2], "new")])[0, 1] > 0.9, "a new request is taken to be like the others"


def test_another_text_is_noticed() -> None:
    """Twenty rejections after hundreds of accepted drafts are not chance: new requests do not inherit what was."""
    rates = AcceptanceRates(4)
    for i in range(100):
        rates.observe(toy.request([1], str(i)), 4, 4 if i % 8 else 0)
    assert rates.expected([toy.request([2], "before")])[0, 1] > 0.8
    for i in range(20):
        rates.observe(toy.request([3], f"other {i}"), 4, 0)
    assert rates.expected([toy.request([4], "after")])[0, 1] < 0.3


def test_chance_is_no_change() -> None:
    """Three of four accepted, at random: what is known stays near that all the time."""
    rng, rates, found = np.random.default_rng(0), AcceptanceRates(1), []
    for i in range(1000):
        rates.observe(toy.request([1], str(i)), 1, int(rng.random() < 0.75))
        found.append(rates.expected([toy.request([2])])[0, 1])
    assert np.std(found[100:]) < 0.08


def test_a_first_pass_says_nothing_where_the_scale_is_known() -> None:
    """Whatever runs for the first time takes longer, and a drafter that seems dear is not tried again for long."""
    cost = DraftCost(4, weights=0.25, window=0.0)
    cost.set_scale(0.01)
    before = cost.costs.copy()
    cost.observe(cost.features([2]), 1.0, 2)
    assert (cost.costs == before).all()
    cost.observe(cost.features([2]), 0.01, 2)
    assert cost.seconds(cost.features([2])) == pytest.approx(0.01, rel=0.1)


def test_costs_are_found_and_never_negative() -> None:
    """Three contexts and four lengths, with noise: a plain pass and a row are known to a few percent."""
    rng, cost = np.random.default_rng(0), TargetCost(4, 1 / 50_000)
    for _ in range(600):
        context, length, batch = rng.choice([100, 5000, 30000]), int(rng.choice([0, 2, 3, 4])), int(rng.integers(1, 5))
        seconds = batch * (1e-3 + context * 1e-6 + length * 5e-4) + 0.01
        cost.observe(cost.features([length] * batch, [context] * batch), seconds * rng.normal(1, 0.02), length)
    assert (cost.costs >= 0).all()
    assert cost.seconds(cost.features([0], [5000])) == pytest.approx(0.016, rel=0.05)
    assert cost.seconds(cost.features([4, 4], [30000, 100])) == pytest.approx(0.046, rel=0.05)
    assert cost.draft_rows(np.array([100.0]))[0, 4] == pytest.approx(2e-3, rel=0.25)


FAULTS: dict[str, tuple[type, str, Callable[..., object] | bool, Callable[[], object]]] = {
    "verification is free": (
        TargetCost,
        "draft_rows",
        lambda self, contexts: np.zeros((len(contexts), self.max_draft_len + 1)),
        lambda: test_nearly_as_fast_as_the_best_fixed_length((0.1, 3.0, 0.5), 8, 300),
    ),
    "nothing counts as a change": (
        AcceptanceRates,
        "_has_changed",
        False,
        test_another_text_is_noticed,
    ),
    "all counts as a change": (
        AcceptanceRates,
        "_has_changed",
        True,
        test_chance_is_no_change,
    ),
    "never a probe": (
        DraftController,
        "_find_probe",
        lambda _self, _view: None,
        lambda: test_changes_are_followed("acceptance rises"),
    ),
    "an outlier counts in full": (
        LinearCost,
        "_judge",
        lambda _self, _error: (1.0, 1.0),
        test_one_slow_step_changes_nothing,
    ),
    "acceptance never fades": (
        AcceptanceRates,
        "observe",
        lambda *_: None,
        lambda: test_changes_are_followed("acceptance falls"),
    ),
    "probes whenever something is old": (
        DraftController,
        "_account",
        lambda self: setattr(self, "_credit", 100 * self._expected),
        lambda: test_probes_cost_less_than_a_percent((1.2, 3.0, 0.3)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault, test = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(AssertionError):
        test()
