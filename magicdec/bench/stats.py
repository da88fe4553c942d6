"""Medians, spreads and ratios of measured runs."""

import statistics
from collections.abc import Sequence

from magicdec.bench.result import BatchRun, Cell, Spread, Summary


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def rate(run: BatchRun) -> float:
    """Tokens a second of the whole batch while it decodes."""
    return run.tokens / run.decode_seconds


def step_seconds(run: BatchRun) -> float:
    """One step: a token of each request without drafts, a round with them."""
    return run.decode_seconds / run.steps


def host_seconds(run: BatchRun) -> float:
    """What scheduler, caches, sampling and acceptance take of a step: all that is neither draft nor verify."""
    return (run.decode_seconds - run.draft_seconds - run.verify_seconds) / run.steps


def acceptance_length(run: BatchRun, batch: int) -> float:
    """Tokens that one step yields for one request; 1 without drafts."""
    return run.tokens / (run.steps * batch)


def speedups(runs: Sequence[BatchRun], neighbours: Sequence[BatchRun]) -> list[float]:
    """Each run against the plain run that was measured directly beside it."""
    return [rate(run) / rate(plain) for run, plain in zip(runs, neighbours, strict=True)]


def summarise(runs: Sequence[BatchRun], neighbours: Sequence[BatchRun], batch: int) -> Summary:
    """neighbours: for each run the plain run beside it; none where the runs are the plain ones themselves."""
    drafted = sum(run.drafted for run in runs)
    return Summary(
        tokens_per_second=spread([rate(run) for run in runs]),
        speedup=spread(speedups(runs, neighbours)) if neighbours else None,
        acceptance_length=statistics.mean(acceptance_length(run, batch) for run in runs),
        acceptance_rate=sum(run.accepted for run in runs) / drafted if drafted else None,
        step_ms=1e3 * statistics.median(step_seconds(run) for run in runs),
        draft_ms=1e3 * statistics.median(run.draft_seconds / run.steps for run in runs),
        verify_ms=1e3 * statistics.median(run.verify_seconds / run.steps for run in runs),
        host_ms=1e3 * statistics.median(host_seconds(run) for run in runs),
    )


def projected_speedup(summary: Summary, plain: Summary, acceptance: float) -> float:
    """Speedup that the measured step times give at a tokens-a-step measured elsewhere."""
    return acceptance * plain.step_ms / summary.step_ms


def auto_shares(cells: Sequence[Cell]) -> list[tuple[Cell, float]]:
    """Each `auto` cell, and its speedup over that of the fastest way that it could have chosen.

    That is plain decoding (1) or a fixed draft length at auto's own window, as measured, also where the cache was
    filled. Speedups, since each is a ratio to the plain run beside it, which leaves most of a noisy machine out.
    """
    autos = [cell for cell in cells if cell.drafter == "auto"]
    return [(auto, speedup_here(auto) / max(map(speedup_here, choices(auto, cells)))) for auto in autos]


def choices(auto: Cell, cells: Sequence[Cell]) -> list[Cell]:
    """What `auto` could have chosen at its point, plain decoding among them."""
    return [cell for cell in cells if _is_choice(auto, cell)]


def speedup_here(cell: Cell) -> float:
    """Speedup as measured, also where the cache was filled; 1 for plain decoding."""
    return 1.0 if cell.summary.speedup is None else cell.summary.speedup.median


def _is_choice(auto: Cell, cell: Cell) -> bool:
    same = (auto.context, auto.batch, auto.temperature) == (cell.context, cell.batch, cell.temperature)
    return same and cell.drafter not in ("auto", "self-full") and cell.window in (None, auto.window)
