"""Who runs, with how many tokens: budget, chunks, admission by memory, preemption."""

import random

import pytest

from magicdec.errors import EngineError, RequestError
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.request import Request, RequestStatus
from magicdec.runtime.engine.scheduler import FixedDrafts, Scheduler, SchedulerOutput
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy

SIZE = 4


class Bench:
    """A scheduler whose steps are played without a model."""

    def __init__(
        self, num_blocks: int = 64, *, draft_len: int = 0, batch: int = 4, tokens: int = 16, caching: bool = False
    ) -> None:
        self.blocks = BlockManager(num_blocks, SIZE, prefix_caching=caching)
        self.draft_len = draft_len
        self.policy = FixedDrafts(lambda _: self.draft_len)
        self.scheduler = Scheduler(self.blocks, max_batch_size=batch, max_num_tokens=tokens)

    def add(self, name: str, length: int, **params: int) -> Request:
        """Prompts differ from the first token on."""
        rng = random.Random(name)
        request = toy.request([rng.randrange(1, 16) for _ in range(length)], name, **{"max_tokens": 100, **params})
        self.scheduler.add(request)
        return request

    def step(self, accepted: int = 0) -> SchedulerOutput:
        """Schedule and commit as an engine does: up to `accepted` drafts and one token; every token is 5."""
        plan = self.scheduler.schedule(self.policy, 0.0)
        for entry in plan.scheduled:
            request = entry.request
            if entry.completes:
                request.token_ids += [5] * (1 + min(accepted, entry.num_draft_tokens))
                request.num_computed_tokens = len(request.token_ids) - 1
            else:
                request.advance(entry.num_tokens)
            self.blocks.publish(request.request_id, request.token_ids, request.num_computed_tokens)
            if request.num_tokens_left <= 0:
                request.finish("length")
                self.scheduler.remove(request)
        self.blocks.check_integrity()
        return plan


def _shares(plan: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(entry.request.request_id, entry.num_tokens, entry.num_draft_tokens) for entry in plan.scheduled]


def test_prompts_are_read_in_chunks_that_fill_the_budget() -> None:
    """First come, first served; the second prompt takes what the first leaves."""
    bench = Bench(tokens=16)
    bench.add("a", 20)
    bench.add("b", 15)
    assert _shares(bench.step()) == [("a", 16, 0)]
    assert _shares(bench.step()) == [("a", 4, 0), ("b", 12, 0)]
    assert _shares(bench.step()) == [("a", 1, 0), ("b", 3, 0)]
    assert _shares(bench.step()) == [("a", 1, 0), ("b", 1, 0)]


def test_decoding_rows_come_first_and_prompts_fill_the_rest() -> None:
    """A long prompt never stalls decoding: each step has every decoding request."""
    bench = Bench(256, draft_len=3, tokens=16)
    bench.add("a", 4)
    bench.add("b", 4)
    bench.step()
    bench.add("long", 150)
    for _ in range(18):
        assert _shares(bench.step()) == [("a", 1, 3), ("b", 1, 3), ("long", 8, 0)]


def test_drafts_leave_a_row_for_each_other_decoding_request() -> None:
    """Budget 6 for three requests that want 1 + 4 each."""
    bench = Bench(draft_len=4, tokens=6)
    for name in "abc":
        bench.add(name, 2)
    bench.step()
    assert _shares(bench.step()) == [("a", 1, 3), ("b", 1, 0), ("c", 1, 0)]


def test_drafts_never_reach_past_the_last_token() -> None:
    """One of the tokens left is the target's own, so the drafts are at most the others."""
    bench = Bench(draft_len=4)
    bench.add("a", 2, max_tokens=8)
    bench.step()
    assert [_shares(bench.step(accepted=1)) for _ in range(4)] == [
        [("a", 1, 4)],
        [("a", 1, 4)],
        [("a", 1, 2)],
        [("a", 1, 0)],
    ]
    assert not bench.scheduler.running


def test_a_chunk_that_leaves_one_token_decodes_next() -> None:
    """The last prompt token is then a row like any other, and may carry drafts."""
    bench = Bench(draft_len=2, tokens=8)
    bench.add("a", 9)
    assert _shares(bench.step()) == [("a", 8, 0)]
    assert _shares(bench.step()) == [("a", 1, 2)]


def test_batch_size_limits_who_is_admitted() -> None:
    """The third waits until a place is free."""
    bench = Bench(batch=2)
    bench.add("a", 2, max_tokens=2)
    bench.add("b", 2)
    bench.add("c", 2)
    bench.step()
    bench.step()
    assert [r.request_id for r in bench.scheduler.waiting] == ["c"]
    assert _shares(bench.step()) == [("b", 1, 0), ("c", 2, 0)]


def test_admission_needs_blocks_for_the_whole_prompt() -> None:
    """And keeps the order: a short prompt does not overtake one that waits for memory."""
    bench = Bench(6)
    first = bench.add("a", 12, max_tokens=3)
    bench.add("b", 16)
    bench.add("c", 1)
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["a"]
    while not first.is_finished:
        bench.step()
    bench.step()
    assert [r.request_id for r in bench.scheduler.running] == ["b", "c"]


def test_admission_counts_shared_blocks_once() -> None:
    """A prompt whose beginning is cached needs blocks for the rest only."""
    bench = Bench(6, caching=True)
    first = bench.add("a", 16, max_tokens=7)
    bench.step()
    again = toy.request([*first.token_ids[:16], 3], "b", max_tokens=7)
    bench.scheduler.add(again)
    bench.step()
    assert again.status is RequestStatus.RUNNING
    assert (again.num_cached_tokens, bench.blocks.num_used_blocks) == (16, 6)
    for _ in range(20):
        bench.step()
    assert (again.is_finished, again.num_preemptions) == (True, 1)
    assert again.num_cached_tokens == 16  # what it found when it came back was its own


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    """Five blocks, two each: the older one takes the last for its drafts, the younger one goes on without drafts."""
    bench = Bench(5, draft_len=4)
    bench.add("a", 7)
    bench.add("b", 7)
    bench.step()
    assert _shares(bench.step()) == [("a", 1, 4), ("b", 1, 0)]
    plan = bench.step()  # token 9 of each needs a third block
    assert _shares(plan) == [("a", 1, 0)]
    assert [request.request_id for request in plan.preempted] == ["b"]


def test_the_youngest_is_preempted_and_keeps_its_output() -> None:
    """It waits at the head of the queue, and is read again with its output tokens when there is room."""
    bench = Bench(5)
    first, second = bench.add("a", 7, max_tokens=10), bench.add("b", 6)
    third = bench.add("c", 1)
    preempted: list[Request] = []
    while not preempted:
        before = list(second.token_ids)
        plan = bench.step()
        preempted = list(plan.preempted)
    assert preempted[0] is not first
    assert second.token_ids[: len(before)] == before
    while second not in preempted:
        preempted += bench.step().preempted
    assert second.status is RequestStatus.WAITING
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert second.num_output_tokens > 0
    assert list(bench.scheduler.waiting) == [second, third]
    kept = list(second.token_ids)
    while second.status is RequestStatus.WAITING:
        plan = bench.step()
    assert first.is_finished
    assert second.token_ids[: len(kept)] == kept
    assert _shares(plan)[0] == ("b", len(kept), 0)


def test_the_oldest_always_goes_on() -> None:
    """Four requests in a pool for one: each step gives the oldest a token, so that all end."""
    bench = Bench(8, draft_len=2)
    requests = [bench.add(name, 10, max_tokens=20) for name in "abcd"]
    for _ in range(200):
        oldest = next((r for r in requests if not r.is_finished), None)
        if oldest is None:
            break
        before = len(oldest.token_ids), oldest.num_computed_tokens
        bench.step(accepted=1)
        assert (len(oldest.token_ids), oldest.num_computed_tokens) > before
    assert all(request.is_finished for request in requests)
    assert bench.blocks.num_used_blocks == 0


def test_siblings_wait_for_the_prompt_that_they_share_and_let_others_pass() -> None:
    """Only the leader reads the prompt; another request uses the place meanwhile."""
    bench = Bench(tokens=8, caching=True)
    leader = bench.add("a", 13)
    sibling = toy.request(leader.token_ids, "b", max_tokens=100)
    sibling.leader = leader
    bench.scheduler.add(sibling)
    bench.add("c", 3)
    assert _shares(bench.step()) == [("a", 8, 0)]
    assert _shares(bench.step()) == [("a", 5, 0), ("c", 3, 0)]
    assert _shares(bench.step()) == [("a", 1, 0), ("c", 1, 0), ("b", 1, 0)]
    assert sibling.num_cached_tokens == 12


def test_remove_works_wherever_the_request_is() -> None:
    """Waiting, running, or gone already."""
    bench = Bench(batch=1)
    first, second = bench.add("a", 5), bench.add("b", 5)
    bench.step()
    bench.scheduler.remove(second)
    bench.scheduler.remove(first)
    bench.scheduler.remove(first)
    assert not bench.scheduler.waiting
    assert not bench.scheduler.running
    assert bench.blocks.num_used_blocks == 0


def test_a_request_that_can_never_fit_is_refused_when_it_is_added() -> None:
    """With the numbers and the mend; one that fits exactly is served."""
    engine = toy.engine("self", num_blocks=5)
    with pytest.raises(RequestError, match=r"may grow to 21 tokens.* holds 20 in all; lower max_tokens"):
        engine.add_request("a", [1] * 11, SamplingParams(max_tokens=10))
    with pytest.raises(RequestError, match="may grow to 200"):
        engine.add_request("a", [1] * 11, SamplingParams(max_tokens=1000))
    assert not engine.has_unfinished_requests
    prompt, param = [1] * 11, SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    (output,) = toy.run(engine, [prompt], [param])
    toy.assert_equal(output.outputs[0], toy.plain(prompt, param))


def test_a_budget_below_the_batch_is_refused() -> None:
    """A step must hold one row of each."""
    with pytest.raises(EngineError, match="max_num_tokens=3 is less than max_batch_size=4"):
        toy.engine("plain", max_num_tokens=3, max_batch_size=4)
