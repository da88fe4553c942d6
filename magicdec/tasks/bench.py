"""Plain and speculative decoding over a grid of contexts, batches and ways to draft."""

import datetime
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from magicdec import __version__
from magicdec.bench.demo_pair import default_engine, read_long_text
from magicdec.console import err, format_bytes, out, shown_warnings
from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from magicdec.bench.grid import Grid
    from magicdec.bench.result import BenchResult, Model
    from magicdec.bench.session import BenchPlan, Session
    from magicdec.pair.config import PairConfig
    from magicdec.runtime.llm import LLM

CHUNK = 1024  # rows of one pass while prompts are read


@dataclass(frozen=True)
class Chosen:
    """What of the grid the user named; None stands for the usual values, or with `full` for those that take hours."""

    contexts: Sequence[int] | None
    batches: Sequence[int] | None
    drafters: Sequence[str] | None
    windows: Sequence[int] | None
    lengths: Sequence[int] | None
    temperatures: Sequence[float] | None
    full: bool

    def grid(self, pair: "PairConfig") -> "Grid":
        """ConfigError where the pair cannot be measured so."""
        from magicdec.bench import grid as grids

        windows = tuple(self.windows or (grids.FULL_WINDOWS if self.full else grids.WINDOWS))
        lengths = tuple(self.lengths or grids.LENGTHS)
        grids.check_lengths(lengths, pair)
        grids.check_windows(windows, pair)
        return grids.Grid(
            self.all_contexts(),
            tuple(self.batches or (grids.FULL_BATCHES if self.full else grids.BATCHES)),
            tuple(self.temperatures or (grids.FULL_TEMPERATURES if self.full else grids.TEMPERATURES)),
            grids.choose_ways(self.drafters or (), pair, windows, lengths),
        )

    def all_contexts(self) -> tuple[int, ...]:
        """Prompt tokens of each point."""
        from magicdec.bench import grid as grids

        return tuple(self.contexts or (grids.FULL_CONTEXTS if self.full else grids.CONTEXTS))


def run_benchmark(
    engine: Path | None,
    chosen: Chosen,
    how: Mapping[str, Any],
    max_minutes: float,
    *,
    text_file: Path | None,
    dtype: Literal["bfloat16", "float32"],
    cache_dir: Path,
    json_file: Path,
    plots: Path | None,
) -> None:
    """Measure, print the table, write the result and draw. engine None: the demo's. how: of `BenchPlan`."""
    from magicdec.bench.plots import check_plots, draw_plots
    from magicdec.bench.result import save
    from magicdec.bench.session import BenchPlan
    from magicdec.bench.table import show
    from magicdec.pair.manifest import load_engine, load_pair

    if plots is not None:
        check_plots()
    _check_writable(json_file)
    with shown_warnings():
        directory = engine or default_engine(cache_dir, dtype, max(chosen.all_contexts()), how["output_tokens"])
        plan = BenchPlan(
            grid=chosen.grid(load_pair(directory).config),
            trained_len=load_engine(directory / "target").trained_len,
            max_seconds=60 * max_minutes,
            **how,
        )
        llm = load(directory, plan)
        result = measure(llm, directory, plan, read_long_text(text_file), str(text_file or "Python's language topics"))
    save(result, json_file)
    show(result, out())
    err().print(f"Wrote {json_file}", soft_wrap=True)
    if plots is not None:
        for path in draw_plots(result, plots):
            err().print(f"Wrote {path}", soft_wrap=True)


def plot_result(result: Path, output: Path) -> None:
    """Draw the plots of an earlier benchmark again, and print its table."""
    from magicdec.bench.plots import check_plots, draw_plots
    from magicdec.bench.result import load as load_result
    from magicdec.bench.table import show

    check_plots()
    loaded = load_result(result)
    show(loaded, out())
    for path in draw_plots(loaded, output):
        err().print(f"Wrote {path}", soft_wrap=True)


def load(directory: Path, plan: "BenchPlan") -> "LLM":
    """The pair with a cache for the largest point of the grid; ConfigError where engine or memory is too small."""
    from magicdec.pair.manifest import load_pair
    from magicdec.pair.memory import free_memory, kv_bytes_per_token
    from magicdec.runtime.llm import LLM

    pair, longest = load_pair(directory).config, plan.sequence_tokens
    if longest > pair.max_seq_len:
        raise ConfigError(
            f"a context of {max(plan.grid.contexts):,} tokens needs {longest:,} with its output, and {directory} was "
            f"built with max_seq_len {pair.max_seq_len:,}; lower --context, or build with a larger max_seq_len "
            "(and beyond_trained_len past the trained length)"
        )
    tokens = max(plan.grid.batches) * (longest + 2 * pair.block_size) + plan.fill_tokens + 2 * pair.block_size
    wanted, free = tokens * kv_bytes_per_token(directory / "target", pair.resolved_kv_cache_dtype), free_memory()
    if wanted > 0.8 * free:
        raise ConfigError(
            f"{max(plan.grid.batches)} x {max(plan.grid.contexts):,} tokens need {format_bytes(wanted)} of KV cache, "
            f"and {format_bytes(free)} are free; lower --context or --batch"
        )
    batch = max(plan.grid.batches)
    with err().status("Loading the model"):
        return LLM(
            directory,
            max_batch_size=batch,
            max_num_tokens=max(CHUNK, batch * (pair.draft.max_draft_len + 1)),
            kv_cache_tokens=tokens,
        )


def measure(llm: "LLM", directory: Path, plan: "BenchPlan", text: str, text_name: str) -> "BenchResult":
    """Run the whole plan, with a bar on stderr."""
    from magicdec.bench.estimate import estimate_seconds, probe
    from magicdec.bench.progress import BenchBar
    from magicdec.bench.session import Session, device_clock
    from magicdec.runtime.runners.opening import default_device

    clock, model = device_clock(default_device(directory / "target")), _model(llm, directory, plan)
    tokens = llm.tokenizer.encode_plain(text)
    with err().status("Estimating the time"):
        pace = probe(llm, plan, tokens, clock)
    seconds = estimate_seconds(plan, pace, model.weight_bytes, model.kv_bytes_per_token)
    _say_estimate(plan, seconds)
    begin = time.perf_counter()
    with BenchBar() as bar:
        session = Session(llm, plan, tokens, clock, bar)
        session.run()
    return _result(session, model, text_name, (time.perf_counter() - begin) / 60)


def _say_estimate(plan: "BenchPlan", seconds: float) -> None:
    points, ways = len(plan.grid.points), len(plan.grid.ways)
    text = f"{points} points, {ways} ways beside plain decoding, {plan.repeats} runs each: about {seconds / 60:.0f} min"
    if seconds > plan.max_seconds:
        text += f"; --max-minutes {plan.max_seconds / 60:g} will leave the last ones out"
    err().print(text, soft_wrap=True)


def _model(llm: "LLM", directory: Path, plan: "BenchPlan") -> "Model":
    from magicdec.bench.result import Model
    from magicdec.pair.memory import plan_memory

    config = llm.config
    return Model(
        engine=directory.name,
        pair=config.name,
        dtype=str(llm.runner.dtype).removeprefix("torch."),
        kv_cache_dtype=config.resolved_kv_cache_dtype,
        weight_bytes=plan_memory(directory, config, context=1, batch_size=1).target_weights,
        kv_bytes_per_token=llm.memory()["target_kv_bytes_per_token"],
        trained_len=plan.trained_len,
        block_size=config.block_size,
        num_sink_tokens=config.draft.num_sink_tokens,
    )


def _result(session: "Session", model: "Model", text_name: str, minutes: float) -> "BenchResult":
    import torch

    from magicdec.bench.comparison import machine
    from magicdec.bench.result import BenchResult, Settings

    plan = session.plan
    return BenchResult(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine(),
        versions={"magicdec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        model=model,
        settings=Settings(
            text=text_name,
            output_tokens=plan.output_tokens,
            repeats=plan.repeats,
            prefill_chunk=session.llm.config.max_num_tokens,
            frequency_penalty=plan.frequency_penalty,
        ),
        minutes=minutes,
        prefill=tuple(session.prefill),
        cells=tuple(session.cells),
        skipped=tuple(session.skipped),
    )


def _check_writable(path: Path) -> None:
    """Before the time is spent."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--json {path} is a directory, or its directory does not exist; give a file to write")
