"""`magicdec bench`: plain and speculative decoding over a grid of contexts, batches and ways to draft."""

import datetime
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from magicdec import __version__
from magicdec.console import err, format_bytes, out, shown_warnings, shows_errors
from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from magicdec.bench.result import BenchResult, Model
    from magicdec.bench.session import BenchPlan, Session
    from magicdec.runtime.llm import LLM

CHUNK = 1024  # rows of one pass while prompts are read
GRID, MEASURING, OUTPUT = "Grid (each repeatable)", "Measuring", "Output"
EPILOG = """[bold]Examples[/]

magicdec bench --plots plots

magicdec bench --context 8192 --batch 8 --window 512 --window 1024 --draft-length 3

magicdec bench --full --max-minutes 180 --json full.json --plots plots

magicdec bench plot full.json --output plots"""
app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True, epilog=EPILOG)
@shows_errors
def bench(
    ctx: typer.Context,
    engine: Annotated[
        Path | None, typer.Option(help="Directory made by build-engine. Default: the demo's model with an int4 draft.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=64, help="Prompt tokens. Default: 1024, 4096, 8192.", rich_help_panel=GRID)
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at a time. Default: 1, 4.", rich_help_panel=GRID)
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="none, self (bounded window), self-int8, self-int4 (with weights in fewer bits), self-full (whole "
            "context, as in the literature), draft (separate model), ngram, auto (who drafts "
            "and how much is chosen at each step). Default: all that the pair has.",
            rich_help_panel=GRID,
        ),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Draft windows in tokens. Default: 512.", rich_help_panel=GRID)
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(help="Draft tokens a round. Default: 2, 4.", rich_help_panel=GRID)
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="0 is greedy. Default: 0.", rich_help_panel=GRID)
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Contexts 1k to 32k, batches 1, 4, 8, windows 256 to 2048, temperatures 0 and 1: hours.",
            rich_help_panel=GRID,
        ),
    ] = False,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens of a measured run.", rich_help_panel=MEASURING)
    ] = 32,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measured runs of each way, interleaved.", rich_help_panel=MEASURING)
    ] = 3,
    max_minutes: Annotated[
        float, typer.Option(min=0, help="Begin nothing new after that.", rich_help_panel=MEASURING)
    ] = 30,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="In greedy decoding; without it so small a model soon repeats itself, which flatters the acceptance.",
            rich_help_panel=MEASURING,
        ),
    ] = 0.3,
    text_file: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text for the prompts. Default: Python's language topics.", rich_help_panel=MEASURING),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        typer.Option(help="Type of the default engine.", rich_help_panel=MEASURING),
    ] = "bfloat16",
    cache_dir: Annotated[
        Path, typer.Option(help="Where the default model and engine are kept.", rich_help_panel=MEASURING)
    ] = Path(".cache"),
    json_file: Annotated[
        Path, typer.Option("--json", help="Where all measured runs are written.", rich_help_panel=OUTPUT)
    ] = Path("bench.json"),
    plots: Annotated[
        Path | None, typer.Option(help="Directory for PNG plots. Default: none are drawn.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Measure plain and speculative decoding side by side, prefill apart from decoding.

    Each speculative run has a plain run directly beside it in time; speedups
    are medians of such pairs. All ways decode over the same weights, cache
    and prompts. Contexts past the trained length give times only: their
    cache is filled with copies of a real prefix, and the table says so.
    """
    if ctx.invoked_subcommand is not None:
        return
    from magicdec.bench import grid as grids
    from magicdec.bench.plots import check_plots, draw_plots
    from magicdec.bench.result import save
    from magicdec.bench.session import BenchPlan
    from magicdec.bench.table import show
    from magicdec.commands.demo import read_long_text
    from magicdec.pair.manifest import load_engine, load_pair

    if plots is not None:
        check_plots()
    _check_writable(json_file)
    with shown_warnings():
        contexts = tuple(context or (grids.FULL_CONTEXTS if full else grids.CONTEXTS))
        batches = tuple(batch or (grids.FULL_BATCHES if full else grids.BATCHES))
        windows = tuple(window or (grids.FULL_WINDOWS if full else grids.WINDOWS))
        lengths = tuple(draft_length or grids.LENGTHS)
        directory = engine or default_engine(cache_dir, dtype, max(contexts), output_tokens)
        pair = load_pair(directory).config
        grids.check_lengths(lengths, pair)
        grids.check_windows(windows, pair)
        plan = BenchPlan(
            grid=grids.Grid(
                contexts,
                batches,
                tuple(temperature or (grids.FULL_TEMPERATURES if full else grids.TEMPERATURES)),
                grids.choose_ways(drafter or (), pair, windows, lengths),
            ),
            output_tokens=output_tokens,
            repeats=repeats,
            frequency_penalty=frequency_penalty,
            trained_len=load_engine(directory / "target").trained_len,
            max_seconds=60 * max_minutes,
        )
        llm = load(directory, plan)
        result = measure(llm, directory, plan, read_long_text(text_file), str(text_file or "Python's language topics"))
    save(result, json_file)
    show(result, out())
    err().print(f"Wrote {json_file}", soft_wrap=True)
    if plots is not None:
        for path in draw_plots(result, plots):
            err().print(f"Wrote {path}", soft_wrap=True)


@app.command("plot")
@shows_errors
def plot(
    result: Annotated[Path, typer.Argument(metavar="JSON", help="File written by bench --json.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Directory for the PNG files.")] = Path("plots"),
) -> None:
    """Draw the plots of an earlier benchmark again, and print its table."""
    from magicdec.bench.plots import check_plots, draw_plots
    from magicdec.bench.result import load
    from magicdec.bench.table import show

    check_plots()
    loaded = load(result)
    show(loaded, out())
    for path in draw_plots(loaded, output):
        err().print(f"Wrote {path}", soft_wrap=True)


def default_engine(
    cache_dir: Path, dtype: Literal["bfloat16", "float32"], longest_context: int, output_tokens: int
) -> Path:
    """The demo's with an int4 draft; past the trained length one that is built for whole multiples of 8k tokens."""
    from magicdec.builder.config import load_config
    from magicdec.commands.demo import CONFIG, prepare_engine

    limit = load_config(CONFIG).max_seq_len
    if longest_context <= limit:
        return prepare_engine(cache_dir, dtype, limit, quantize_draft="int4")
    needed = longest_context + 2 * output_tokens + 64
    return prepare_engine(cache_dir, dtype, -(-needed // limit) * limit, quantize_draft="int4")


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
