"""The file that a benchmark leaves: machine, settings, every measured run, and what follows from them."""

import json
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from magicdec.errors import ConfigError
from magicdec.pair.config import Frozen

SCHEMA_VERSION: Final = 1
Drafter = Literal["none", "self", "self-full", "self-int8", "self-int4", "draft", "ngram", "auto"]


class Spread(Frozen):
    """Median and range of repeated runs."""

    median: float
    low: float
    high: float


class BatchRun(Frozen):
    """One run of a batch. Decoding is counted from the second step after the whole batch has its first token, while
    all of the batch is still writing; what comes before is reading the prompts, the target's and the draft's.

    tokens: committed by the whole batch; drafted, accepted: draft tokens. Seconds are over all steps.
    """

    reading_seconds: float
    decode_seconds: float
    steps: int
    tokens: int
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


class Summary(Frozen):
    """What the runs of a cell come to.

    acceptance_length: tokens a step and request; acceptance_rate: share of draft tokens that stay, None without
    drafts. Milliseconds are of one step (a round), medians of the runs; host is all that is neither draft nor verify.
    """

    tokens_per_second: Spread
    speedup: Spread | None
    acceptance_length: float
    acceptance_rate: float | None
    step_ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float


class Cell(Frozen):
    """One way to decode at one context, batch and temperature.

    prompt_tokens: the context, or a little less so that the output stays within the trained length.
    window: tokens that a draft looks at, None where that is no setting; draft_length: None is chosen at run time.
    plain_runs: for each run the plain run that was measured beside it. identical: whether every run wrote the tokens of
    plain decoding, None where sampling makes that no question. beyond_trained_len: the cache was filled with copies of
    a real prefix's keys and values, so that times mean something and acceptance does not; projected_speedup is then
    what these times give at the acceptance of the same way at `projected_from` tokens, None if that was not measured.
    """

    context: int
    prompt_tokens: int
    batch: int
    temperature: float
    drafter: Drafter
    window: int | None
    draft_length: int | None
    beyond_trained_len: bool
    target_kv_bytes: int
    draft_kv_bytes: int
    identical: bool | None
    runs: tuple[BatchRun, ...]
    plain_runs: tuple[BatchRun, ...]
    summary: Summary
    projected_speedup: float | None = None
    projected_from: int | None = None

    @property
    def speedup(self) -> float | None:
        """The figure to show: measured, or projected where acceptance could not be measured; None = neither."""
        if self.beyond_trained_len:
            return self.projected_speedup
        return self.summary.speedup.median if self.summary.speedup else None

    @property
    def name(self) -> str:
        """The way alone, as in legends."""
        window = "" if self.window is None or self.drafter == "self-full" else f" w{self.window}"
        length = "" if self.draft_length is None or self.drafter == "none" else f" x{self.draft_length}"
        return f"{self.drafter}{window}{length}"


class Prefill(Frozen):
    """Reading the prompts of a whole batch at once. filled: not read but copied; tokens_per_second is None then."""

    context: int
    batch: int
    seconds: float
    filled: bool
    tokens_per_second: float | None


class Skipped(Frozen):
    """A part of the grid that was left out, and why."""

    what: str
    why: str


class Model(Frozen):
    """What was measured. Bytes of weights are those of the target."""

    engine: str
    pair: str
    dtype: str
    kv_cache_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    trained_len: int
    block_size: int
    num_sink_tokens: int


class Settings(Frozen):
    """How it was measured. Tokens are of one request; frequency_penalty is for greedy decoding only."""

    text: str
    output_tokens: int
    repeats: int
    prefill_chunk: int
    frequency_penalty: float


class BenchResult(Frozen):
    """A whole benchmark, as its JSON file holds it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    created: str
    machine: str
    versions: dict[str, str]
    model: Model
    settings: Settings
    minutes: float
    prefill: tuple[Prefill, ...]
    cells: tuple[Cell, ...]
    skipped: tuple[Skipped, ...] = Field(default=())


def save(result: BenchResult, path: Path) -> None:
    """Write the JSON file."""
    try:
        path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; give another path") from error


def load(path: Path) -> BenchResult:
    """Read what `save` wrote; ConfigError says what is wrong with the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is no result of magicdec bench: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version is {version!r}, and this version of magicdec reads {SCHEMA_VERSION}; measure anew"
        )
    try:
        return BenchResult.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']} (got {first['input']!r:.200}); measure anew") from error
