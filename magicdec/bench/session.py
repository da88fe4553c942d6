"""Measures a grid on one engine: reads the prompts, warms up, and interleaves plain and speculative runs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from magicdec.bench.drafters import draft_kv_bytes, make_drafting
from magicdec.bench.grid import PLAIN, Grid, Point, Way
from magicdec.bench.prompts import FILL_FROM, cut_prompts, fill_prompts
from magicdec.bench.result import BatchRun, Cell, Prefill, Skipped
from magicdec.bench.run import BatchRunner, Clock, same_tokens
from magicdec.bench.stats import projected_speedup, summarise
from magicdec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM

WARM_UP_TOKENS = 8


class OnBenchProgress(Protocol):
    """Told what is going on, and the share of the whole that is done where that has changed."""

    def __call__(self, what: str, done: float | None = None) -> None:
        """Show it."""
        ...


@dataclass(frozen=True)
class BenchPlan:
    """How to measure. Tokens are of one request and run; frequency_penalty is for greedy decoding only."""

    grid: Grid
    output_tokens: int
    repeats: int
    frequency_penalty: float
    trained_len: int
    max_seconds: float

    @property
    def run_tokens(self) -> int:
        """Output tokens that a run may need: the measured ones, and room so that no request ends before them."""
        return self.output_tokens + 4 * (self.max_length + 1)

    @property
    def max_length(self) -> int:
        """The longest draft of the grid."""
        return max((way.most_drafts for way in self.grid.ways), default=0)

    def is_beyond(self, context: int) -> bool:
        """Whether the model was not trained on so long a context."""
        return context > self.trained_len

    def prompt_tokens(self, context: int) -> int:
        """The context, or a little less where the output would otherwise outgrow the trained length."""
        return context if self.is_beyond(context) else min(context, self.trained_len - self.run_tokens)

    @property
    def fill_tokens(self) -> int:
        """Tokens of the real prefix that long contexts are filled from; 0 where none is that long."""
        return min(FILL_FROM, self.trained_len) if any(map(self.is_beyond, self.grid.contexts)) else 0

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt_tokens(context) for context in self.grid.contexts) + self.run_tokens

    def sampling(self, point: Point, way: Way, seed: int) -> SamplingParams:
        """Greedy, or drawn with a seed; acceptance by rejection either way, which keeps most drafts."""
        greedy = point.temperature == 0
        return SamplingParams(
            temperature=point.temperature,
            frequency_penalty=self.frequency_penalty if greedy else 0.0,
            seed=seed,
            acceptance="rejection",
            max_tokens=self.run_tokens,
            ignore_eos=True,
            num_draft_tokens=way.draft_length,
        )


@dataclass
class _Measured:
    """The runs of one way at one point."""

    runs: list[BatchRun] = field(default_factory=list)
    beside: list[BatchRun] = field(default_factory=list)  # the plain run next to each
    identical: bool = True


class Session:
    """One benchmark in progress. tokens: of the text that prompts are cut from; clock: in seconds."""

    def __init__(
        self, llm: "LLM", plan: BenchPlan, tokens: Sequence[int], clock: Clock, on_progress: OnBenchProgress
    ) -> None:
        self.llm, self.plan, self.tokens, self.clock, self.on_progress = llm, plan, tokens, clock, on_progress
        self.prefill: list[Prefill] = []
        self.cells: list[Cell] = []
        self.skipped: list[Skipped] = []
        self._auto: BatchRunner | None = None  # one for all points, as one controller serves an engine for its life

    def run(self) -> None:
        """Measure point by point until the grid or the time is at its end; what is left out is noted."""
        begin, context, points = self.clock(), 0, self.plan.grid.points
        for index, point in enumerate(points):
            if self.clock() - begin > self.plan.max_seconds:
                self.skipped.append(Skipped(what=describe(point), why="time limit"))
                continue
            self.on_progress(describe(point), index / len(points))
            prompts = self.prompts(point.context)
            if point.context != context:  # the first batch of a context is the largest
                context = point.context
                self._prepare(point, prompts)
            self.cells += self._measure(point, prompts)
        self.cells = [self._project(cell) for cell in self.cells]

    def prompts(self, context: int) -> list[list[int]]:
        """The prompts of the largest batch; a smaller one takes its turn with some of them in each repeat."""
        grid = self.plan.grid
        offset = 7 * sorted(grid.contexts).index(context)
        return cut_prompts(self.tokens, self.plan.prompt_tokens(context), max(grid.batches), offset)

    def _prepare(self, point: Point, prompts: list[list[int]]) -> None:
        """Bring the prompts into the prefix cache."""
        runner = BatchRunner(self.llm.engine, make_drafting(self.llm, PLAIN), self.clock)
        single = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, num_draft_tokens=0)

        def on_read(done: int, total: int) -> None:
            if total:
                self.on_progress(f"{describe(point)}: reading prompts, {100 * done // total} %")

        filled = self.plan.is_beyond(point.context)
        if not filled:
            seconds = runner.read(prompts, single, on_read)
        else:
            size = self.llm.config.block_size
            source = list(self.tokens[: min(FILL_FROM, self.plan.trained_len - 1) // size * size])
            runner.read([[*source, source[0]]], single, on_read)
            begin = self.clock()
            fill_prompts(self.llm, source, prompts)
            seconds = self.clock() - begin
        self.prefill.append(
            Prefill(
                context=point.context,
                batch=point.batch,
                seconds=seconds,
                filled=filled,
                tokens_per_second=None if filled else sum(map(len, prompts)) / seconds,
            )
        )

    def _measure(self, point: Point, prompts: list[list[int]]) -> list[Cell]:
        ways = self.plan.grid.ways_at(point.context)
        runners = {way: self._runner(way) for way in (PLAIN, *ways)}
        for way, runner in runners.items():
            self.on_progress(f"{describe(point)}: warming up")
            params = self._params(point, way, 0)
            # A controller learns what steps cost here, as it has in any engine that has run for a second.
            tokens = self.plan.output_tokens if way.drafter == "auto" else WARM_UP_TOKENS
            runner.run(prompts[: point.batch], params, min(tokens, self.plan.output_tokens))
        measured = {way: _Measured() for way in runners}
        for repeat in range(self.plan.repeats):
            chosen = [prompts[(repeat * point.batch + index) % len(prompts)] for index in range(point.batch)]
            outputs: dict[Way, list[list[int]]] = {}
            for order in interleave(ways, repeat):
                group: dict[Way, BatchRun] = {}
                for way in order:
                    self.on_progress(f"{describe(point)}: {way.drafter}, run {repeat + 1}")
                    params = self._params(point, way, repeat)
                    group[way], outputs[way] = runners[way].run(chosen, params, self.plan.output_tokens)
                measured[PLAIN].runs.append(group.pop(PLAIN))
                for way, run in group.items():
                    measured[way].runs.append(run)
                    measured[way].beside.append(measured[PLAIN].runs[-1])
                    measured[way].identical &= same_tokens(outputs[PLAIN], outputs[way])
        return [self._cell(point, way, measured[way]) for way in measured]

    def _runner(self, way: Way) -> BatchRunner:
        if way.drafter == "auto":
            if self._auto is None:
                self._auto = BatchRunner(self.llm.engine, make_drafting(self.llm, way), self.clock)
            return self._auto
        return BatchRunner(self.llm.engine, make_drafting(self.llm, way), self.clock)

    def _params(self, point: Point, way: Way, repeat: int) -> list[SamplingParams]:
        return [self.plan.sampling(point, way, 1000 * repeat + index) for index in range(point.batch)]

    def _cell(self, point: Point, way: Way, measured: _Measured) -> Cell:
        per_token, size = self.llm.memory()["target_kv_bytes_per_token"], self.llm.config.block_size
        prompt = self.plan.prompt_tokens(point.context)
        return Cell(
            context=point.context,
            prompt_tokens=prompt,
            batch=point.batch,
            temperature=point.temperature,
            drafter=way.drafter,
            window=way.window,
            draft_length=way.draft_length,
            beyond_trained_len=self.plan.is_beyond(point.context),
            target_kv_bytes=-(-prompt // size) * size * point.batch * per_token,
            draft_kv_bytes=draft_kv_bytes(self.llm, way, point.batch),
            identical=measured.identical if point.temperature == 0 else None,
            runs=tuple(measured.runs),
            plain_runs=tuple(measured.beside),
            summary=summarise(measured.runs, measured.beside, point.batch),
        )

    def _project(self, cell: Cell) -> Cell:
        """Beyond the trained length: speedup at the acceptance of the longest context within it."""
        if not cell.beyond_trained_len or cell.drafter in ("none", "auto"):
            return cell
        key = (cell.drafter, cell.window, cell.draft_length, cell.batch, cell.temperature)
        within = [
            other
            for other in self.cells
            if not other.beyond_trained_len
            and key == (other.drafter, other.window, other.draft_length, other.batch, other.temperature)
        ]
        if not within:
            return cell
        reference = max(within, key=lambda other: other.context)
        plain = next(
            other
            for other in self.cells
            if other.drafter == "none"
            and (other.context, other.batch, other.temperature) == (cell.context, cell.batch, cell.temperature)
        )
        speedup = projected_speedup(cell.summary, plain.summary, reference.summary.acceptance_length)
        return cell.model_copy(update={"projected_speedup": speedup, "projected_from": reference.context})


def interleave(ways: Sequence[Way], repeat: int) -> Iterator[list[Way]]:
    """Groups in the order of measuring: plain decoding in the middle of two ways, so that each has it beside it.

    Every other repeat is mirrored, so that a machine that warms up or slows down favours none.
    """
    order = list(ways) if repeat % 2 == 0 else list(reversed(ways))
    for start in range(0, len(order), 2):
        pair = order[start : start + 2]
        yield [pair[0], PLAIN, *pair[1:]]
    if not order:
        yield [PLAIN]


def describe(point: Point) -> str:
    """`4 x 8,192 tokens, T=0`."""
    return f"{point.batch} x {point.context:,} tokens, T={point.temperature:g}"


def device_clock(device: str) -> Clock:
    """Seconds, read when the device has done what it was given."""
    if not device.startswith("cuda"):
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
