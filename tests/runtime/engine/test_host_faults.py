"""Faults planted in the real source, one at a time: the named test must fail, or it proves nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from magicdec.pair import budget
from magicdec.runtime.drafting import views as draft_cache
from magicdec.runtime.drafting.cyclic_blocks import CyclicBlocks
from magicdec.runtime.drafting.ngram import _History
from magicdec.runtime.drafting.views import CyclicView, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.block_tables import BlockTables
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import Scheduler
from tests.runtime.drafting import test_cyclic_blocks as cyclic_tests
from tests.runtime.drafting import test_ngram as ngram_tests
from tests.runtime.drafting import test_views as draft_tests
from tests.runtime.engine import test_block_manager as block_manager_tests
from tests.runtime.engine import test_block_tables as model_input_tests
from tests.runtime.engine import test_engine_ends as end_tests
from tests.runtime.engine import test_engine_toy as engine_tests
from tests.runtime.engine import test_scheduler as scheduler_tests
from tests.runtime.engine import test_state_machine as machines
from tests.support.faults import plant

SHAPE = (4, 8, 3, 4)
QUICK = settings(max_examples=40, stateful_step_count=40, phases=[Phase.generate], report_multiple_bugs=False)


def _machine(machine: type[RuleBasedStateMachine]) -> Callable[[], None]:
    return lambda: run_state_machine_as_test(machine, settings=QUICK)


@dataclass(frozen=True)
class Fault:
    """In `function` of `owner`, `old` becomes `new`; each of the tests must fail."""

    owner: type | ModuleType
    function: str
    old: str
    new: str
    tests: tuple[Callable[[], Any], ...]


FAULTS = {
    "one spare block": Fault(
        budget,
        "num_cyclic_blocks",
        "// block_size) + 2",
        "// block_size) + 1",
        (
            lambda: cyclic_tests.test_hundreds_of_wraps(SHAPE),
            lambda: draft_tests.test_views_over_hundreds_of_wraps("in_cache", SHAPE),
            _machine(machines.InCacheMachine),
        ),
    ),
    "rewind lowers nothing": Fault(
        CyclicBlocks,
        "rewind",
        "min(self.num_tokens, num_tokens)",
        "self.num_tokens",
        (
            lambda: cyclic_tests.test_hundreds_of_wraps(SHAPE),
            lambda: draft_tests.test_accepted_drafts_are_not_read_again(2, [9]),
            _machine(machines.AbsoluteMachine),
        ),
    ),
    "the newest block is reused": Fault(
        CyclicBlocks,
        "_rotate",
        "self._recent.pop(0)",
        "self._recent.pop()",
        (lambda: cyclic_tests.test_hundreds_of_wraps(SHAPE), _machine(machines.InCacheMachine)),
    ),
    "rejected drafts are confirmed": Fault(
        draft_cache._DraftState,
        "num_confirmed",
        "if draft != token_id:",
        "if False:",
        (
            lambda: draft_tests.test_plain_steps_after_a_rejection_do_not_confirm_rejected_drafts("in_cache"),
            _machine(machines.InCacheMachine),
        ),
    ),
    "sinks stay behind": Fault(
        CyclicView,
        "_append",
        "if cache_len and self.sinks_follow",
        "if False and self.sinks_follow",
        (
            lambda: draft_tests.test_views_over_hundreds_of_wraps("in_cache", SHAPE),
            lambda: engine_tests.test_windows_that_wrap_many_times("in_cache", 2, 2, 1),
        ),
    ),
    "draft view one block late": Fault(
        TargetWindow,
        "_look_ahead",
        "// size) - sinks",
        "// size + 1) - sinks",
        (
            draft_tests.test_target_window_names_sinks_and_window_of_the_targets_own_table,
            _machine(machines.SelfMachine),
        ),
    ),
    "draft table one block late": Fault(
        BlockTables,
        "views",
        "+= num_skipped[:, None]",
        "+= num_skipped[:, None] - (num_skipped[:, None] > 0)",
        (
            draft_tests.test_target_window_names_sinks_and_window_of_the_targets_own_table,
            lambda: engine_tests.test_windows_that_wrap_many_times("self", 2, 2, 1),
            _machine(machines.SelfMachine),
        ),
    ),
    "verify reads one block too few": Fault(
        BlockTables,
        "views",
        "num_blocks - num_skipped",
        "num_blocks - num_skipped - 1",
        (
            lambda: model_input_tests.test_views_are_packed_as_their_sequences_one_by_one(1),
            lambda: engine_tests.test_batch_of_one("ngram"),
        ),
    ),
    "drafts count as computed": Fault(
        Request,
        "commit",
        "len(self.token_ids) - 1",
        "len(self.token_ids)",
        (lambda: engine_tests.test_batch_of_one("ngram"), _machine(machines.SelfMachine)),
    ),
    "drafts are published": Fault(
        Engine,
        "_commit",
        "request.token_ids, request.num_computed_tokens)",
        "request.token_ids + draft.token_ids, request.num_computed_tokens + len(draft.token_ids))",
        (lambda: engine_tests.test_prefix_cache_hits_change_nothing("self", 33), _machine(machines.SelfMachine)),
    ),
    "half full blocks are published": Fault(
        BlockManager,
        "publish",
        "num_computed_tokens // size)",
        "-(-num_computed_tokens // size))",
        (
            block_manager_tests.test_only_full_blocks_of_computed_tokens_are_found,
            _machine(block_manager_tests.PoolMachine),
            _machine(machines.SelfMachine),
        ),
    ),
    "a whole prompt is reused": Fault(
        BlockManager,
        "_match",
        "(len(token_ids) - 1) // size",
        "len(token_ids) // size",
        (
            block_manager_tests.test_one_token_is_always_left_to_compute,
            lambda: engine_tests.test_prefix_cache_hits_change_nothing("plain", 16),
        ),
    ),
    "content without what is before it": Fault(
        BlockManager,
        "_match",
        "parent = _digest(parent,",
        'parent = _digest(b"",',
        (block_manager_tests.test_prefix_is_shared_while_its_owner_lives_and_after,),
    ),
    "preemption loses output tokens": Fault(
        Request,
        "preempt",
        "self.num_computed_tokens = 0",
        "self.num_computed_tokens = 0; del self.token_ids[self.num_prompt_tokens :]",
        (
            scheduler_tests.test_the_youngest_is_preempted_and_keeps_its_output,
            lambda: engine_tests.test_forced_preemption("ngram", 28, 1.0),
            _machine(machines.SelfMachine),
        ),
    ),
    "preemption keeps the computed length": Fault(
        Request,
        "preempt",
        "self.num_computed_tokens = 0",
        "pass",
        (scheduler_tests.test_the_youngest_is_preempted_and_keeps_its_output,),
    ),
    "drafts take the rows of others": Fault(
        Scheduler,
        "schedule",
        "room = budget - (len(decoding) - index - 1)",
        "room = budget",
        (
            scheduler_tests.test_drafts_leave_a_row_for_each_other_decoding_request,
            _machine(machines.SelfMachine),
        ),
    ),
    "a stop keeps later tokens": Fault(
        Request,
        "_count_until_end",
        "break",
        "pass",
        (
            lambda: end_tests.test_end_inside_an_accepted_run("self", "stop_token", 3),
            lambda: end_tests.test_tokens_behind_an_end_were_accepted_and_are_dropped("in_cache"),
        ),
    ),
    "a finished request keeps its draft": Fault(
        Engine,
        "_retire",
        "self.drafting.proposer.release(request)",
        "pass",
        (lambda: engine_tests.test_batch_of_one("in_cache"), _machine(machines.InCacheMachine)),
    ),
    "a preempted request keeps its draft": Fault(
        Engine,
        "_schedule",
        "self.drafting.proposer.release(request)",
        "pass",
        (lambda: engine_tests.test_forced_preemption("in_cache", 28, 1.0),),
    ),
    "the last n-gram finds itself": Fault(
        _History,
        "continuation",
        "np.flatnonzero(tokens[:-1] == tokens[-1])",
        "np.flatnonzero(tokens == tokens[-1])",
        (ngram_tests.test_long_match_wins_over_a_later_short_one,),
    ),
    "an n-gram that is too short counts": Fault(
        _History,
        "continuation",
        "size >= min_ngram",
        "size >= min_ngram - 1",
        (ngram_tests.test_same_as_a_naive_search,),
    ),
    "the first n-gram is taken, not the latest": Fault(
        _History,
        "continuation",
        "int(ends[-1])",
        "int(ends[0])",
        (ngram_tests.test_same_as_a_naive_search,),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of the tests that claim to see it."""
    fault = FAULTS[name]
    plant(monkeypatch, fault.owner, fault.function, fault.old, fault.new)
    for test in fault.tests:
        with pytest.raises((AssertionError, IndexError, KeyError)):
            test()


def test_without_a_fault_these_tests_pass() -> None:
    """The calls above are right; the machines and the longer ones run in their own modules."""
    for name in ("sinks stay behind", "verify reads one block too few", "a stop keeps later tokens"):
        for test in FAULTS[name].tests:
            test()
