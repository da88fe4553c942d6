"""PNG plots of a benchmark. matplotlib is an optional extra, and draws without a screen."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.bench.result import BenchResult, Cell, Drafter
from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
COLORS: dict[Drafter, str] = {
    "none": "black",
    "self": "tab:blue",
    "self-full": "tab:red",
    "self-int8": "tab:cyan",
    "self-int4": "tab:purple",
    "draft": "tab:green",
    "ngram": "tab:orange",
    "auto": "tab:olive",
}
MARKERS = "osD^v"  # one a window
STACK = (("draft", "draft_ms"), ("verify", "verify_ms"), ("host", "host_ms"))


def check_plots() -> None:
    """ConfigError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install 'magicdec[bench]', or leave --plots out"
        ) from None


def draw_plots(result: BenchResult, directory: Path) -> list[Path]:
    """Write all plots of all temperatures; returns their paths."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error}; give another directory for the plots") from error
    temperatures = sorted({cell.temperature for cell in result.cells})
    written = []
    for temperature in temperatures:
        cells = [cell for cell in result.cells if cell.temperature == temperature]
        suffix = f"-t{temperature:g}" if len(temperatures) > 1 else ""
        for name, draw in PLOTS.items():
            path = directory / f"{name}{suffix}.png"
            _save(draw(cells), path)
            written.append(path)
    return written


def speedup_over_context(cells: Sequence[Cell]) -> "Figure":
    """One panel a batch, one line a way; at each context the best draft length."""
    batches = sorted({cell.batch for cell in cells})
    figure, panels = _panels(len(batches))
    for batch, axes in zip(batches, panels, strict=True):
        of_batch = [cell for cell in cells if cell.batch == batch and cell.drafter != "none"]
        for name, line in _best_lengths(of_batch).items():
            axes.plot(
                [cell.context for cell in line],
                [cell.speedup or 0.0 for cell in line],
                **_style(line[0], cells),
                label=name,
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        _context_axis(axes, cells)
        axes.set(title=f"batch {batch}", ylabel="speedup over plain decoding (best draft length)", ylim=(0, None))
        axes.legend(fontsize=7)
    return figure


def throughput_over_batch(cells: Sequence[Cell]) -> "Figure":
    """One panel a context, one line a way; contexts past the trained length have no throughput of their own."""
    within = [cell for cell in cells if not cell.beyond_trained_len]
    contexts = sorted({cell.context for cell in within}) or [0]
    figure, panels = _panels(len(contexts))
    for context, axes in zip(contexts, panels, strict=True):
        of_context = [cell for cell in within if cell.context == context]
        for name, line in _best_lengths(of_context, axis="batch").items():
            rates = [cell.summary.tokens_per_second for cell in line]
            axes.errorbar(
                [cell.batch for cell in line],
                [rate.median for rate in rates],
                yerr=[[r.median - r.low for r in rates], [r.high - r.median for r in rates]],
                **_style(line[0], cells),
                capsize=2,
                label=name,
            )
        axes.set(title=f"context {context:,}", xlabel="batch", ylabel="tokens/s (best draft length)", ylim=(0, None))
        axes.legend(fontsize=7)
    return figure


def split_of_step(cells: Sequence[Cell]) -> "Figure":
    """Draft, verify and host of one step, stacked, at the longest context and largest batch that was measured."""
    largest = max(((cell.context, cell.batch) for cell in cells), key=lambda each: each[0] * each[1])
    shown = [cell for cell in cells if (cell.context, cell.batch) == largest]
    figure, (axes,) = _panels(1, height=1.5 + 0.3 * len(shown))
    left = [0.0] * len(shown)
    names = [cell.name for cell in shown]
    for label, attribute in STACK:
        widths = [getattr(cell.summary, attribute) for cell in shown]
        axes.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title=f"one step, {largest[1]} x {largest[0]:,} tokens", xlabel="ms")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draft_time_over_context(cells: Sequence[Cell]) -> "Figure":
    """Milliseconds of one draft token: flat for a bounded view, growing like a plain step for the whole context."""
    batches = sorted({cell.batch for cell in cells})
    figure, panels = _panels(len(batches))
    for batch, axes in zip(batches, panels, strict=True):
        of_batch = [cell for cell in cells if cell.batch == batch]
        plain = sorted((cell for cell in of_batch if cell.drafter == "none"), key=lambda cell: cell.context)
        axes.plot(
            [cell.context for cell in plain],
            [cell.summary.step_ms for cell in plain],
            color="black",
            linestyle="--",
            label="plain step",
        )
        for name, line in _shortest_lengths([cell for cell in of_batch if _has_draft_pass(cell)]).items():
            tokens = [_draft_token_ms(cell) for cell in line]
            axes.plot([cell.context for cell in line], tokens, **_style(line[0], cells), label=name)
        _context_axis(axes, cells)
        axes.set(title=f"batch {batch}", ylabel="ms a draft token", ylim=(0, None))
        axes.legend(fontsize=7)
    return figure


PLOTS: dict[str, Callable[[Sequence[Cell]], "Figure"]] = {
    "speedup": speedup_over_context,
    "throughput": throughput_over_batch,
    "step": split_of_step,
    "draft-time": draft_time_over_context,
}


def _best_lengths(cells: Iterable[Cell], axis: str = "context") -> dict[str, list[Cell]]:
    """By way without its draft length: at each context (or batch) the cell of the fastest length."""
    best: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        if axis == "context" and cell.speedup is None:
            continue
        line, at = best.setdefault(_name(cell), {}), getattr(cell, axis)
        if at not in line or _merit(cell) > _merit(line[at]):
            line[at] = cell
    return {name: [line[at] for at in sorted(line)] for name, line in best.items()}


def _merit(cell: Cell) -> float:
    return cell.summary.tokens_per_second.median if cell.speedup is None else cell.speedup


def _shortest_lengths(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """By way without its draft length, the cells of the shortest one."""
    lines: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.context):
        shortest = min(other.draft_length or 0 for other in cells if _name(other) == _name(cell))
        if cell.draft_length == shortest:
            lines.setdefault(_name(cell), []).append(cell)
    return lines


def _style(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    """A drafter has its colour in every plot, a window its marker."""
    windows = sorted({other.window for other in cells if other.window is not None})
    marker = MARKERS[windows.index(cell.window) % len(MARKERS)] if cell.window is not None else "o"
    return {"color": COLORS[cell.drafter], "marker": marker}


def _has_draft_pass(cell: Cell) -> bool:
    return cell.drafter not in ("none", "ngram", "auto")


def _draft_token_ms(cell: Cell) -> float:
    drafted, steps = (sum(getattr(run, name) for run in cell.runs) for name in ("drafted", "steps"))
    return cell.summary.draft_ms * steps * cell.batch / drafted if drafted else 0.0


def _name(cell: Cell) -> str:
    return "plain" if cell.drafter == "none" else cell.name.rsplit(" x", 1)[0]


def _panels(count: int, height: float = 4.0) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count + 0.8, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _context_axis(axes: "Axes", cells: Sequence[Cell]) -> None:
    contexts = sorted({cell.context for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}k" if context >= 1024 else str(context) for context in contexts])
    axes.minorticks_off()
    axes.set_xlabel("context in tokens")
    beyond = sorted({cell.context for cell in cells if cell.beyond_trained_len})
    if beyond:
        axes.axvspan(beyond[0] * 0.75, contexts[-1] * 1.1, color="grey", alpha=0.15)
        axes.annotate("timing only", (contexts[-1], 0.02), xycoords=("data", "axes fraction"), ha="right", fontsize=7)


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; give another directory for the plots") from error
