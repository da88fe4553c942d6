"""What the commands print: errors, progress bars, tables. Results go to stdout, all else to stderr."""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from magicdec.errors import MagicDecError, RequestError

if TYPE_CHECKING:
    from magicdec.runtime.outputs import RequestMetrics

P = ParamSpec("P")
R = TypeVar("R")
USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def out() -> Console:
    """The console of results."""
    return Console(highlight=False)


def err() -> Console:
    """The console of everything that is not the result, so that the result can be piped on."""
    return Console(stderr=True, highlight=False)


def shows_errors(command: Callable[P, R]) -> Callable[P, R]:
    """A user's mistake becomes one message and exit code 2; Ctrl-C ends quietly with 130. Bugs keep their traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except MagicDecError as error:
            err().print("[bold red]Error:[/]", end=" ")
            err().print(str(error), markup=False, soft_wrap=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            err().print("\nInterrupted.")
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def bars(*columns: ProgressColumn) -> Progress:
    """Bars on stderr, with these columns behind the usual ones; nothing where stderr is no terminal."""
    console = err()
    usual = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
    return Progress(*usual, *columns, console=console, disable=not console.is_terminal)


@contextmanager
def shown_warnings() -> Iterator[None]:
    """What the package logs as a warning goes to stderr, above any progress bar."""
    handler = _WarningHandler(logging.WARNING)
    logger = logging.getLogger("magicdec")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _WarningHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err().print("[bold yellow]Warning:[/]", end=" ")
        err().print(record.getMessage(), markup=False, soft_wrap=True)


class StageBars:
    """Progress bars on stderr, one for each stage of `(stage, done, total)`; nothing where stderr is no terminal.

    Call it as the callback of a build or a download. `finish()` leaves the bars as they stand, so that other text can
    follow; leaving the context does that too.
    """

    def __init__(self) -> None:
        self._progress = bars()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "StageBars":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of the stage are done. total 0: not known yet."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage[:1].upper() + stage[1:], total=None)
        self._progress.update(self._tasks[stage], completed=done, total=total or None)

    def finish(self) -> None:
        """Stop drawing. May be called more than once."""
        self._progress.stop()


class PrefillBar:
    """The `on_progress` of LLM.generate and generate_stream: a bar while the prompt is read, gone before any text."""

    def __init__(self, num_prompt_tokens: int, label: str = "Reading the prompt") -> None:
        self._bars = StageBars()
        self._label, self._total = f"{label} ({num_prompt_tokens:,} tokens)", num_prompt_tokens

    def __enter__(self) -> "PrefillBar":
        self._bars.__enter__()
        self._bars(self._label, 0, self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.finish()

    def __call__(self, outputs: Sequence[object], done: int, total: int) -> None:
        """total 0: every open request has its first token."""
        self._bars(self._label, done if total else self._total, total or self._total)
        if outputs:
            self._bars.finish()


class TextStream:
    """Writes the growing text of a stream to stdout, each piece once."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, text: str) -> None:
        """`text` is all the text so far."""
        sys.stdout.write(text[self._shown :])
        sys.stdout.flush()
        self._shown = len(text)


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def format_bytes(count: int) -> str:
    """`45.0 MiB (47,185,920 bytes)`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit} ({count:,} bytes)"
    return f"{count} bytes"


def decode_rate(metrics: "RequestMetrics") -> float:
    """Tokens a second from the first output token to the last; 0 where there is only one."""
    tokens = metrics.num_output_tokens - 1
    return tokens / metrics.decode_seconds if tokens > 0 and metrics.decode_seconds > 0 else 0.0


def summary(metrics: "RequestMetrics") -> str:
    """The closing line of a generation."""
    computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
    parts = [
        f"{metrics.num_prompt_tokens:,} prompt tokens in {metrics.prefill_seconds:.1f} s"
        + (f" ({computed / metrics.prefill_seconds:,.0f} tokens/s)" if metrics.prefill_seconds > 0 else ""),
        f"{metrics.num_output_tokens:,} output tokens in {metrics.decode_seconds:.1f} s"
        + (f" ({decode_rate(metrics):.1f} tokens/s)" if decode_rate(metrics) else ""),
    ]
    if metrics.num_rounds:
        parts.append(
            f"acceptance length {metrics.acceptance_length:.2f} "
            f"({metrics.num_accepted_tokens} of {metrics.num_draft_tokens} draft tokens accepted)"
        )
    return "; ".join(parts)


def read_text(path: Path) -> str:
    """A UTF-8 file of the user's."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file") from error
