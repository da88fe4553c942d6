"""The bar of a benchmark."""

from types import TracebackType

from rich.progress import TimeRemainingColumn

from magicdec.console import bars


class BenchBar:
    """One bar on stderr with what is being measured; nothing where stderr is no terminal. An `OnBenchProgress`."""

    def __init__(self) -> None:
        self._progress = bars(TimeRemainingColumn())
        self._task = self._progress.add_task("Measuring", total=1.0)

    def __enter__(self) -> "BenchBar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, done: float | None = None) -> None:
        """done: share of the whole; None = as before."""
        self._progress.update(self._task, description=what, completed=done)
