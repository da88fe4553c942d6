"""Scheduler, block manager and draft caches together, driven by drawn arrivals, draft lengths, acceptances and ends."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from magicdec.runtime.engine.request import Request
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.audit import Audit

BATCH, MAX_DRAFT_LEN, WINDOW, SINKS = 3, 4, 8, 3
TEXT = [(index * index // 3 + 7 * index) % (toy.VOCAB_SIZE - 1) + 1 for index in range(60)]
PER_REQUEST = st.lists(st.integers(0, MAX_DRAFT_LEN), min_size=BATCH + 1, max_size=BATCH + 1)
SETTINGS = settings(max_examples=70, stateful_step_count=40, phases=[Phase.generate, Phase.shrink])


class EngineMachine(RuleBasedStateMachine):
    """Subclasses name the drafter. Outputs are compared with plain decoding after every step."""

    kind: toy.Kind

    @initialize(
        num_blocks=st.sampled_from([21, 24, 32, 80]),
        max_num_tokens=st.sampled_from([BATCH, 7, 16, 64]),
        prefix_caching=st.booleans(),
    )
    def build(self, num_blocks: int, max_num_tokens: int, prefix_caching: bool) -> None:
        """A pool that holds between one and all of the requests."""
        self.engine = toy.engine(
            self.kind,
            num_draft_tokens=MAX_DRAFT_LEN,
            num_blocks=num_blocks,
            max_batch_size=BATCH,
            max_num_tokens=max_num_tokens,
            max_seq_len=84,
            window_size=WINDOW,
            num_sink_tokens=SINKS,
            prefix_caching=prefix_caching,
            draft_length=lambda request: self.lengths[self.lane(request)],
        )
        self.audit = Audit(self.engine, window_size=WINDOW, num_sink_tokens=SINKS, script=self.script)
        self.expected: dict[str, list[toy.Expected]] = {}
        self.open: dict[str, SamplingParams] = {}
        self.lengths = self.accepted = [0] * (BATCH + 1)
        self.num_added = 0

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        length=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        max_tokens=st.sampled_from([1, 5, 50, 100]),
        n=st.sampled_from([1, 1, 1, 3]),
        ends=st.sampled_from(["never", "never", "eos", "token", "string", "late"]),
    )
    def add(self, length: int, temperature: float, seed: int, max_tokens: int, n: int, ends: str) -> None:
        """A prompt that shares its beginning with all others, with one of the ways to end."""
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            n=n,
            ignore_eos=ends == "never",
            stop_token_ids=[3] if ends == "token" else [],
            stop=["ab", "ee"] if ends == "string" else [],
            min_tokens=min(8, max_tokens) if ends == "late" else 0,
        )
        name, prompt = str(self.num_added), TEXT[:length]
        self.num_added += 1
        self.expected[name] = [toy.plain(prompt, params, index=index, max_seq_len=84) for index in range(n)]
        self.engine.add_request(name, prompt, params)
        self.open[name] = params

    @precondition(lambda self: self.open)
    @rule(lengths=PER_REQUEST, accepted=PER_REQUEST)
    def step(self, lengths: list[int], accepted: list[int]) -> None:
        """One step, of which the draft length and the number of right draft tokens are drawn for each request."""
        self.lengths, self.accepted = lengths, accepted
        before = {request: request.num_accepted_tokens for request in self.engine.scheduler.running}
        for output in self.engine.step():
            self.compare(output)
        toy.check_integrity(self.engine)
        self.audit.check_slots()
        self.check_requests(before)

    @precondition(lambda self: self.open)
    @rule(lengths=PER_REQUEST, accepted=PER_REQUEST, times=st.integers(2, 15))
    def many_steps(self, lengths: list[int], accepted: list[int], times: int) -> None:
        """So that examples reach far."""
        for _ in range(times):
            self.step(lengths, accepted)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any open request, wherever it is."""
        output = self.engine.abort(data.draw(st.sampled_from(sorted(self.open))))
        assert output is not None
        self.compare(output, aborted=True)
        toy.check_integrity(self.engine)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        """As if blocks had run out."""
        youngest = self.engine.scheduler.running[-1]
        self.engine.scheduler._preempt(youngest)
        self.engine.drafting.proposer.release(youngest)
        toy.check_integrity(self.engine)

    def teardown(self) -> None:
        """Every admitted request ends, and nothing is held then."""
        if not hasattr(self, "engine"):
            return
        for number in range(toy.MAX_STEPS):
            if not self.engine.has_unfinished_requests:
                break
            self.step([number % (MAX_DRAFT_LEN + 1)] * (BATCH + 1), [number % 3] * (BATCH + 1))
        assert not self.open, "the engine stands still"

    def lane(self, request: Request) -> int:
        """Which of the drawn numbers a request uses."""
        name, index = request.request_id.split("#")
        return (int(name) + int(index)) % (BATCH + 1)

    def script(self, request: Request, drafts: Sequence[int]) -> int:
        """The right token for as long as drafts shall be accepted, then a wrong one."""
        name, index = request.request_id.split("#")
        output, position = self.expected[name][int(index)].token_ids, request.num_output_tokens + len(drafts)
        right = output[position] if position < len(output) else 1
        return right if len(drafts) < self.accepted[self.lane(request)] else (right + 1) % toy.VOCAB_SIZE

    def compare(self, output: RequestOutput, aborted: bool = False) -> None:
        """A finished output equals the oracle's, an unfinished one is its beginning."""
        name = output.request_id
        for mine, expected in zip(output.outputs, self.expected[name], strict=True):
            if mine.finish_reason is None or (aborted and mine.finish_reason == "abort"):
                assert mine.token_ids == expected.token_ids[: len(mine.token_ids)]
                assert expected.text.startswith(mine.text) or aborted
            else:
                toy.assert_equal(mine, expected)
        assert output.finished or not aborted
        if output.finished:
            del self.open[name]

    def check_requests(self, before: dict[Request, int]) -> None:
        """What a step leaves behind: one pending token after a verify pass, and as many accepted drafts as scripted."""
        for entry in self.audit.plan.scheduled:
            request = entry.request
            name, index = request.request_id.split("#")
            assert request.is_finished or request.num_pending_tokens >= 1
            assert (
                request.num_computed_tokens == len(request.token_ids) - 1
                or request.num_output_tokens == 0
                or (request.num_preemptions > 0)
            )
            left = len(self.expected[name][int(index)].token_ids) - request.num_output_tokens
            if entry.num_draft_tokens and left > 0 and not request.params.min_tokens:
                scripted = min(self.accepted[self.lane(request)], entry.num_draft_tokens)
                assert request.num_accepted_tokens - before[request] == scripted


class SelfMachine(EngineMachine):
    """Drafts through the target's own blocks."""

    kind = "self"


class InCacheMachine(EngineMachine):
    """A separate draft whose sinks follow the window."""

    kind = "in_cache"


class AbsoluteMachine(EngineMachine):
    """A separate draft whose sinks stay."""

    kind = "absolute"


@pytest.mark.parametrize("machine", [SelfMachine, InCacheMachine, AbsoluteMachine])
def test_outputs_equal_plain_decoding_whatever_happens(machine: type[EngineMachine]) -> None:
    """Adding, stepping, preempting and aborting in any order."""
    run_state_machine_as_test(machine, settings=SETTINGS)
