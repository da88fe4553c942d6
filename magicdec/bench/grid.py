"""What a benchmark measures: contexts, batches and temperatures, and the ways to decode at each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.bench.result import Drafter
from magicdec.errors import ConfigError
from magicdec.pair.config import PairConfig

CONTEXTS, BATCHES, WINDOWS, LENGTHS, TEMPERATURES = (1024, 4096, 8192), (1, 4), (512,), (2, 4), (0.0,)
FULL_CONTEXTS, FULL_BATCHES = (1024, 4096, 8192, 16384, 32768), (1, 4, 8)
FULL_WINDOWS, FULL_TEMPERATURES = (256, 512, 1024, 2048), (0.0, 1.0)


@dataclass(frozen=True)
class Way:
    """One way to decode. window: tokens that a draft sees, None where there is nothing to choose.

    draft_length: None where the engine chooses, up to max_draft_len.
    """

    drafter: Drafter
    window: int | None = None
    draft_length: int | None = None
    max_draft_len: int = 0

    @property
    def most_drafts(self) -> int:
        """The most draft tokens in one round of one request."""
        return self.max_draft_len if self.draft_length is None else self.draft_length


PLAIN = Way("none", None, 0)


@dataclass(frozen=True)
class Point:
    """One context, batch and temperature. context is the prompt's length."""

    context: int
    batch: int
    temperature: float


@dataclass(frozen=True)
class Grid:
    """All that is measured: each way at each point; contexts ascend, batches descend.

    A larger batch first: its prompts are then found in the prefix cache by the smaller ones.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    ways: tuple[Way, ...]

    @property
    def points(self) -> list[Point]:
        """All points, in the order of measuring."""
        return [
            Point(context, batch, temperature)
            for context in sorted(self.contexts)
            for batch in sorted(self.batches, reverse=True)
            for temperature in self.temperatures
        ]

    def ways_at(self, context: int) -> list[Way]:
        """A window that holds the whole context is `self-full`, and left out here if that is measured as well."""
        full = any(way.drafter == "self-full" for way in self.ways)
        return [
            way
            for way in self.ways
            if not (full and way.drafter == "self" and way.window is not None and way.window >= context)
        ]


def available_drafters(pair: PairConfig) -> list[Drafter]:
    """What a pair can be measured with, plain decoding aside."""
    own: list[Drafter] = []
    if pair.draft.kind == "model":
        own = ["draft"]
    elif pair.has_draft_weights:
        own = ["self-int8" if pair.quantization.weight_only_draft == "int8" else "self-int4"]
    return ["self", *own, "self-full", "ngram", "auto"]


def choose_ways(
    drafters: Sequence[str], pair: PairConfig, windows: Sequence[int], lengths: Sequence[int]
) -> tuple[Way, ...]:
    """The ways of the drafters that the user named; all that the pair has where none is named."""
    able = available_drafters(pair)
    for name in drafters:
        if name not in able and name != "none":
            raise ConfigError(
                f"--drafter {name} cannot be measured with this pair; it can draft by {', '.join(able)}; a "
                "separate draft model, int8 and int4 need a pair that was built with them"
            )
    chosen = [name for name in able if not drafters or name in drafters]
    return tuple(way for name in chosen for way in _ways_of(name, pair, windows, lengths))


def check_lengths(lengths: Sequence[int], pair: PairConfig) -> None:
    """Refuse draft lengths that the pair was not built for."""
    for length in lengths:
        if not 1 <= length <= pair.draft.max_draft_len:
            raise ConfigError(
                f"--draft-length {length} is not within 1 and the pair's max_draft_len {pair.draft.max_draft_len}"
            )


def check_windows(windows: Sequence[int], pair: PairConfig) -> None:
    """Refuse windows that are not whole blocks."""
    for window in windows:
        if window < pair.block_size or window % pair.block_size:
            raise ConfigError(f"--window {window} is not a multiple of the pair's block size {pair.block_size}")


def _ways_of(drafter: Drafter, pair: PairConfig, windows: Sequence[int], lengths: Sequence[int]) -> list[Way]:
    if drafter in ("self", "self-int8", "self-int4"):
        return [Way(drafter, window, length) for window in windows for length in lengths]
    if drafter == "auto":
        return [Way(drafter, pair.draft.window_size, max_draft_len=pair.draft.max_draft_len)]
    window = pair.draft.window_size if drafter == "draft" else None
    return [Way(drafter, window, length) for length in lengths]
