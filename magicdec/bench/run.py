"""One batch through an engine, with the time of each part of its steps."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from magicdec.bench.result import BatchRun
from magicdec.errors import EngineError
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.proposer import Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.runners.interface import ModelRunner
from magicdec.runtime.sampling.draft import Draft
from magicdec.runtime.sampling_params import SamplingParams

Clock = Callable[[], float]


class TimedRunner:
    """A runner that adds up the seconds of its passes."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self.runner, self.clock, self.seconds = runner, clock, 0.0
        self.vocab_size, self.num_blocks, self.block_size = runner.vocab_size, runner.num_blocks, runner.block_size

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """The runner's own, timed."""
        start = self.clock()
        logits = self.runner.forward(inputs)
        self.seconds += self.clock() - start
        return logits

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """The runner's own."""
        return self.runner.read_keys(slots, positions)

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """The runner's own."""
        self.runner.write_keys(slots, positions, keys)


class TimedProposer:
    """A proposer that adds up the seconds of its drafts."""

    def __init__(self, proposer: Proposer, clock: Clock) -> None:
        self.proposer, self.clock, self.seconds = proposer, clock, 0.0

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """The proposer's own, timed."""
        start = self.clock()
        drafts = self.proposer.propose(scheduled)
        self.seconds += self.clock() - start
        return drafts

    def release(self, request: Request) -> None:
        """The proposer's own."""
        self.proposer.release(request)


@dataclass(frozen=True)
class _Mark:
    """Where a run stands: seconds and counts so far."""

    time: float
    draft_seconds: float
    verify_seconds: float
    tokens: int
    drafted: int
    accepted: int


class BatchRunner:
    """Runs batches through one engine with one way of drafting, timing draft, verify and whole steps by `clock`."""

    def __init__(self, engine: Engine, drafting: Drafting, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.target, self.proposer = TimedRunner(engine.runner, clock), TimedProposer(drafting.proposer, clock)
        self._drafting = replace(drafting, proposer=self.proposer)

    def run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], num_tokens: int
    ) -> tuple[BatchRun, list[list[int]]]:
        """Decode until the fastest request has written `num_tokens` in the measured part.

        Returns the run and all output tokens of each request. params must leave room for more than `num_tokens`: the
        batch is whole in every measured step.
        """
        names = [f"bench-{index}" for index in range(len(prompts))]
        latest: dict[str, RequestOutput] = {}
        with self._timed(names):
            begin = self.clock()
            for name, prompt, param in zip(names, prompts, params, strict=True):
                self.engine.add_request(name, prompt, param)
            while len(latest) < len(names):
                self._step(latest)
            self._step(latest)  # a separate draft reads its prompts in the first round
            opening, before = self._mark(latest), [_num_tokens(latest[name]) for name in names]
            steps = 0
            while max(_num_tokens(latest[n]) - b for n, b in zip(names, before, strict=True)) < num_tokens:
                self._step(latest)
                steps += 1
                assert not any(output.finished for output in latest.values()), "params leave too little room"
            closing = self._mark(latest)
        if any(output.metrics.num_preemptions for output in latest.values()):
            raise EngineError("the KV cache was too small for the batch, so that requests were computed twice")
        run = BatchRun(
            reading_seconds=opening.time - begin,
            decode_seconds=closing.time - opening.time,
            steps=steps,
            tokens=closing.tokens - opening.tokens,
            drafted=closing.drafted - opening.drafted,
            accepted=closing.accepted - opening.accepted,
            draft_seconds=closing.draft_seconds - opening.draft_seconds,
            verify_seconds=closing.verify_seconds - opening.verify_seconds,
        )
        return run, [latest[name].outputs[0].token_ids for name in names]

    def read(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, on_progress: Callable[[int, int], None]
    ) -> float:
        """Read the prompts and no more, which the prefix cache then keeps; seconds until each has its first token.

        params: of a single token. on_progress: called after each step with (tokens read, tokens in all).
        """
        names = [f"read-{index}" for index in range(len(prompts))]
        latest: dict[str, RequestOutput] = {}
        begin = self.clock()
        try:
            for name, prompt in zip(names, prompts, strict=True):
                self.engine.add_request(name, prompt, params)
            while len(latest) < len(names):
                self._step(latest)
                on_progress(*self.engine.prompt_progress())
            return self.clock() - begin
        finally:
            for name in names:
                self.engine.abort(name)

    @contextlib.contextmanager
    def _timed(self, names: Sequence[str]) -> Iterator[None]:
        """The engine drafts in this way and its passes are timed; then it has its own parts, and none of the names."""
        engine, runner = self.engine, self.engine.runner
        own, engine.runner = engine.use(self._drafting), self.target
        try:
            yield
        finally:
            for name in names:
                engine.abort(name)
            engine.runner = runner
            engine.use(own)

    def _step(self, latest: dict[str, RequestOutput]) -> None:
        for output in self.engine.step():
            latest[output.request_id] = output
            if output.outputs[0].error is not None:
                raise EngineError(f"the model failed while it was measured: {output.outputs[0].error}")

    def _mark(self, latest: dict[str, RequestOutput]) -> _Mark:
        metrics = [output.metrics for output in latest.values()]
        return _Mark(
            time=self.clock(),
            draft_seconds=self.proposer.seconds,
            verify_seconds=self.target.seconds,
            tokens=sum(each.num_output_tokens for each in metrics),
            drafted=sum(each.num_draft_tokens for each in metrics),
            accepted=sum(each.num_accepted_tokens for each in metrics),
        )


def same_tokens(wanted: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> bool:
    """Whether two runs wrote the same, as far as both of them got."""
    return all(a == b for x, y in zip(wanted, others, strict=True) for a, b in zip(x, y, strict=False))


def _num_tokens(output: RequestOutput) -> int:
    return len(output.outputs[0].token_ids)
