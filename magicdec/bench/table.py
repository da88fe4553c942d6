"""The result of a benchmark as a table: on a terminal, and as Markdown."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from magicdec.bench.result import BenchResult, Cell, Spread
from magicdec.bench.stats import auto_shares

HEADS = (
    "context",
    "batch",
    "T",
    "drafter",
    "tokens/s",
    "speedup",
    "tokens a step",
    "kept",
    "step ms",
    "draft + verify + host",
    "same",
    "KV MB target + draft",
)
SCREEN_HEADS = ("drafter", "tokens/s", "speedup", "a step", "kept", "ms", "draft", "verify", "host", "same")
WIDTH = 100  # where the output is no terminal, so that a file holds whole columns
PROJECTED = "~"


def show(result: BenchResult, console: Console) -> None:
    """Print a table for each point of the grid, and the notes."""
    if not console.is_terminal:
        console.width = WIDTH
    console.print(f"[bold]{result.model.pair}[/], {result.model.dtype}")
    points = dict.fromkeys((cell.context, cell.batch, cell.temperature) for cell in result.cells)
    for point in points:
        cells = [cell for cell in result.cells if (cell.context, cell.batch, cell.temperature) == point]
        console.print(_point_table(cells))
    for note in notes(result):
        console.print(note, markup=False, soft_wrap=True)


def _point_table(cells: Sequence[Cell]) -> Table:
    first = cells[0]
    beyond = ", timing only" if first.beyond_trained_len else ""
    title = (
        f"{first.batch} x {first.context:,} tokens, temperature {first.temperature:g}, "
        f"KV {first.target_kv_bytes / 1e6:,.1f} MB{beyond}"
    )
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in SCREEN_HEADS:
        table.add_column(head, justify="left" if head == "drafter" else "right", overflow="fold")
    for cell in cells:
        summary = cell.summary
        parts = (summary.step_ms, summary.draft_ms, summary.verify_ms, summary.host_ms)
        table.add_row(
            cell.name,
            _rate(cell, spread=False),
            _speedup(cell),
            _length(cell),
            _kept(cell),
            *(f"{part:.1f}" for part in parts),
            _identical(cell),
        )
    return table


def markdown(result: BenchResult) -> str:
    """The same for a page of documentation."""
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    lines += [f"| {' | '.join(row)} |" for row in rows(result.cells)]
    return "\n".join([*lines, "", *(f"{note}\n" for note in notes(result))]).rstrip()


def rows(cells: Sequence[Cell]) -> Iterable[tuple[str, ...]]:
    """A row a cell, in the order of HEADS."""
    for cell in cells:
        summary = cell.summary
        yield (
            f"{cell.context:,}",
            str(cell.batch),
            f"{cell.temperature:g}",
            cell.name,
            _rate(cell, spread=True),
            _speedup(cell),
            _length(cell),
            _kept(cell),
            f"{summary.step_ms:.1f}",
            f"{summary.draft_ms:.1f} + {summary.verify_ms:.1f} + {summary.host_ms:.1f}",
            _identical(cell),
            f"{cell.target_kv_bytes / 1e6:,.1f} + {cell.draft_kv_bytes / 1e6:,.1f}",
        )


def notes(result: BenchResult) -> list[str]:
    """What one has to know to read the table."""
    model, settings = result.model, result.settings
    lines = [
        f"Medians of {settings.repeats} runs of {settings.output_tokens} output tokens, in brackets the lowest and "
        "highest; tokens/s are of the whole batch, decoding only. Each speculative run is compared with a plain run "
        "directly beside it, on the same prompts; speedup is the median of these ratios. A batch smaller than the "
        "largest one has other prompts in each repeat. Milliseconds are of one step, a round of draft, "
        "verification and the host's work; tokens a step are of one request, kept is the share of drafts accepted.",
        f"Drafts see w tokens and are x tokens long; self-full drafts read the whole context, as in the literature. "
        f"Prompts: {settings.text}; greedy decoding with a frequency penalty of {settings.frequency_penalty:g}, "
        "sampling with acceptance by rejection.",
        _prefill(result),
    ]
    shortened = [cell for cell in result.cells if cell.prompt_tokens < cell.context]
    if shortened:
        lines.append(
            f"At {shortened[0].context:,} tokens the prompt has {shortened[0].prompt_tokens:,}, so that the output "
            f"stays within the trained length of {model.trained_len:,}."
        )
    if any(cell.beyond_trained_len for cell in result.cells):
        lines.append(_beyond(result))
    shares = auto_shares(result.cells)
    if shares:
        lines.append(_auto(shares))
    if any(cell.identical is False for cell in result.cells):
        lines.append(
            "same = NO: at least one run wrote another token than plain decoding. In 16-bit types a pass over several "
            " rows may round differently from a pass over one; in float32 it should not happen."
        )
    lines += [f"Left out: {skipped.what} ({skipped.why})." for skipped in result.skipped]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines.append(f"Machine: {result.machine}; {versions}; {result.created}, {result.minutes:.1f} min.")
    return lines


def _prefill(result: BenchResult) -> str:
    read = [
        f"{each.batch} x {each.context:,} tokens in {each.seconds:.1f} s ({each.tokens_per_second:,.0f} tokens/s)"
        for each in result.prefill
        if each.tokens_per_second is not None
    ]
    return f"Prefill, not in the figures above: {'; '.join(read) or 'none was computed'}."


def _beyond(result: BenchResult) -> str:
    return (
        f"Contexts over {result.model.trained_len:,} tokens, which the model was trained on, are timing only: their "
        "prompts were not read, their cache holds copies of a real prefix's keys and values. Acceptance means nothing "
        f"there and is not shown; a speedup with {PROJECTED} is what the measured step times give at the acceptance "
        "that the same way had at the longest context within the trained length (none is shown where that was not "
        "measured)."
    )


def _means_nothing(cell: Cell) -> bool:
    """Whether what depends on acceptance was not measured on text that the model understands."""
    return cell.beyond_trained_len and cell.drafter != "none"


def _rate(cell: Cell, *, spread: bool) -> str:
    if _means_nothing(cell):
        return ""
    values = cell.summary.tokens_per_second
    return _range(values, 1) if spread else f"{values.median:.1f}"


def _length(cell: Cell) -> str:
    return "" if _means_nothing(cell) else f"{cell.summary.acceptance_length:.2f}"


def _kept(cell: Cell) -> str:
    kept = cell.summary.acceptance_rate
    return "" if kept is None or _means_nothing(cell) else f"{kept:.0%}"


def _auto(shares: Sequence[tuple[Cell, float]]) -> str:
    worst, share = min(shares, key=lambda each: each[1])
    where = f"{worst.batch} x {worst.context:,} tokens, T={worst.temperature:g}"
    return (
        f"auto chooses drafter and draft length at run time. It reaches {share:.2f} (at {where}) to "
        f"{max(each for _, each in shares):.2f} times the speed of the fastest way that it can choose, plain decoding "
        "among them; past the trained length at the acceptance that the filled cache happens to give."
    )


def _speedup(cell: Cell) -> str:
    if cell.beyond_trained_len:
        return "" if cell.projected_speedup is None else f"{PROJECTED}{cell.projected_speedup:.2f}"
    return "" if cell.summary.speedup is None else _range(cell.summary.speedup, 2)


def _identical(cell: Cell) -> str:
    if cell.drafter == "none" or cell.identical is None:
        return ""
    return "yes" if cell.identical else "NO"


def _range(values: Spread, digits: int) -> str:
    return f"{values.median:.{digits}f} ({values.low:.{digits}f}-{values.high:.{digits}f})"
