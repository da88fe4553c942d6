"""Watches an engine on ToyRunner from outside: who owns each slot, what each view shows, and what a plan may hold.

The drafts are scripted, so that a test chooses how many of them the target will accept.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from magicdec.plugins.model.inputs import ModelInput, SequenceInput
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.views import DraftView
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftPolicy, SchedulerOutput
from tests.support.toy_runner import ToyRunner

# The next draft token of a request, after these draft tokens.
Script = Callable[[Request, Sequence[int]], int]
CERTAIN = 100.0  # a logit that no noise outweighs


class Audit:
    """Wraps the parts of an engine; every check is an assertion inside the engine's own step."""

    def __init__(self, engine: Engine, *, window_size: int, num_sink_tokens: int, script: Script) -> None:
        assert isinstance(engine.runner, ToyRunner)
        self.engine = engine
        self.target = engine.runner
        self.plan = SchedulerOutput((), ())
        self.cache: AuditedCache | None = None
        self._forward = engine.runner.forward
        self._schedule = engine.scheduler.schedule
        engine.runner.forward = self._audited_forward  # type: ignore[method-assign]
        engine.scheduler.schedule = self._audited_schedule  # type: ignore[method-assign]
        if isinstance(engine.drafting.proposer, ModelProposer):
            proposer = engine.drafting.proposer
            runner = proposer.runner
            assert isinstance(runner, ToyRunner)
            proposer.cache = self.cache = AuditedCache(proposer.cache, runner, window_size, num_sink_tokens)
            proposer.runner = _Scripted(runner, self.cache, script)

    def check_slots(self) -> None:
        """Every computed token of every running request still stands in its slot."""
        for request in self.engine.scheduler.running:
            slots = self.engine.blocks.slots(request.request_id, 0, request.num_computed_tokens)
            for index, slot in enumerate(slots):
                entry = self.target.slots[slot]
                assert entry is not None
                assert (entry.token_id, entry.position) == (request.token_ids[index], index), "a live slot was lost"

    def _audited_forward(self, inputs: ModelInput) -> torch.Tensor:
        for slot in inputs.slot_mapping.tolist():
            self._check_write(slot)
        return self._forward(inputs)

    def _check_write(self, slot: int) -> None:
        """A write goes to a slot that one sequence alone owns, at or beyond its computed length; never published."""
        blocks, size = self.engine.blocks, self.engine.blocks.block_size
        block = slot // size
        owners = [owner for owner in blocks.owners if block in blocks.table(owner)]
        assert len(owners) == 1, f"slot {slot} is written, and {owners} hold it"
        assert block not in published(blocks), f"slot {slot} of a published block is written"
        (request,) = [r for r in self.engine.scheduler.running if r.request_id == owners[0]]
        index = blocks.table(owners[0]).index(block) * size + slot % size
        assert index >= request.num_computed_tokens, f"token {index} is written again"

    def _audited_schedule(self, policy: DraftPolicy, now: float) -> SchedulerOutput:
        scheduler = self.engine.scheduler
        if self.cache is not None:
            self.cache.pending = []  # of a step that raised
        decoding = [request for request in scheduler.running if request.num_pending_tokens == 1]
        plan = self.plan = self._schedule(policy, now)
        rows = [entry.num_tokens + entry.num_draft_tokens for entry in plan.scheduled]
        assert all(count > 0 for count in rows)
        assert sum(rows) <= scheduler.max_num_tokens, "the token budget is exceeded"
        assert len(scheduler.running) <= scheduler.max_batch_size
        chosen = [entry.request for entry in plan.scheduled]
        assert len(set(chosen)) == len(chosen)
        assert not set(chosen) & set(plan.preempted)
        assert set(chosen) <= set(scheduler.running)
        assert set(decoding) <= set(chosen) | set(plan.preempted), "a decoding request is left out"
        for entry in plan.scheduled:
            request = entry.request
            assert 0 < entry.num_tokens <= request.num_pending_tokens
            assert entry.num_draft_tokens == 0 or entry.num_tokens == 1 == request.num_pending_tokens
            assert entry.num_draft_tokens < request.num_tokens_left
        return plan


class AuditedCache:
    """A DraftView that compares what each draft pass is shown with the history that it should be shown."""

    def __init__(self, inner: DraftView, runner: ToyRunner, window_size: int, num_sink_tokens: int) -> None:
        self.inner = inner
        self.runner = runner
        self.window_size = window_size
        self.num_sinks = -(-num_sink_tokens // runner.block_size) * runner.block_size
        self.drafts: dict[Request, list[int]] = {}
        self.pending: list[Request] = []  # whose rows are in the coming pass, in order
        self.num_views = 0
        self.num_bounded_views = 0  # of them, with something evicted

    def catch_up(self, requests: Sequence[Request]) -> ModelInput:
        """As the inner cache; the drafts of an earlier round are over."""
        self.drafts.update((request, []) for request in requests)
        return self._audit(requests, self.inner.catch_up(requests))

    def feed(self, requests: Sequence[Request], token_ids: Sequence[int], num_drafts: int) -> ModelInput:
        """As the inner cache."""
        for request, token_id in zip(requests, token_ids, strict=True):
            self.drafts[request].append(token_id)
            assert len(self.drafts[request]) == num_drafts
        return self._audit(requests, self.inner.feed(requests, token_ids, num_drafts))

    def release(self, request: Request) -> None:
        """As the inner cache."""
        self.drafts.pop(request, None)
        self.inner.release(request)

    def _audit(self, requests: Sequence[Request], inputs: ModelInput) -> ModelInput:
        self.pending += requests
        for request, row in zip(requests, unpack(inputs), strict=True):
            self._check(request, row)
        return inputs

    def _check(self, request: Request, row: SequenceInput) -> None:
        history = request.token_ids + self.drafts[request]
        size, num_seen = self.runner.block_size, row.cache_len + len(row.token_ids)
        num_evicted, num_recent = len(history) - num_seen, num_seen - self.num_sinks
        assert num_evicted % size == 0
        assert num_recent >= min(self.window_size, len(history) - self.num_sinks), "the draft sees too little"
        assert -(-num_recent // size) <= -(-self.window_size // size) + 2, "the draft sees more than its budget"
        seen = []
        for entry in range(row.cache_len):
            cached = self.runner.slots[row.block_table[entry // size] * size + entry % size]
            assert cached is not None, "the draft sees an empty slot"
            seen.append(cached.token_id)
        expected = history[: self.num_sinks] + history[self.num_sinks + num_evicted :]
        assert seen + list(row.token_ids) == expected, "the draft sees another text"
        self.num_views += 1
        self.num_bounded_views += num_evicted > 0


class _Scripted:
    """The draft's runner, whose logits are certain of the scripted token."""

    def __init__(self, runner: ToyRunner, cache: AuditedCache, script: Script) -> None:
        self.runner = runner
        self.cache = cache
        self.script = script
        self.vocab_size = runner.vocab_size
        self.num_blocks = runner.num_blocks
        self.block_size = runner.block_size

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [N, V]; all checks of the inner runner are made."""
        pending, self.cache.pending = self.cache.pending, []
        logits = torch.zeros_like(self.runner.forward(inputs))
        for row, request in zip(logits, pending, strict=True):
            row[self.script(request, self.cache.drafts[request])] = CERTAIN
        return logits

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """As the inner runner."""
        return self.runner.read_keys(slots, positions)

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """As the inner runner."""
        self.runner.write_keys(slots, positions, keys)


def unpack(inputs: ModelInput) -> list[SequenceInput]:
    """The sequences of a pass, one by one."""
    starts, wanted = inputs.query_start_loc.tolist(), inputs.logits_indices.tolist()
    rows = []
    for index, (start, stop) in enumerate(itertools.pairwise(starts)):
        num_logits = sum(start <= row < stop for row in wanted)
        assert all(row in wanted for row in range(stop - num_logits, stop)), "logits are wanted of other rows"
        rows.append(
            SequenceInput(
                token_ids=inputs.input_ids[start:stop].tolist(),
                positions=inputs.positions[start:stop].tolist(),
                cache_len=int(inputs.cache_lens[index]),
                block_table=inputs.block_table[index].tolist(),
                slot_mapping=inputs.slot_mapping[start:stop].tolist(),
                num_logits=num_logits,
            )
        )
    return rows


def published(blocks: BlockManager) -> set[int]:
    """Blocks that can be found by content."""
    return set(blocks._hash_of_block)
