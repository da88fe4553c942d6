"""`magicdec bench`: plain and speculative decoding over a grid of contexts, batches and ways to draft."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import shows_errors
from magicdec.tasks.bench import Chosen, plot_result, run_benchmark

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
    chosen = Chosen(
        contexts=context,
        batches=batch,
        drafters=drafter,
        windows=window,
        lengths=draft_length,
        temperatures=temperature,
        full=full,
    )
    how = {"output_tokens": output_tokens, "repeats": repeats, "frequency_penalty": frequency_penalty}
    run_benchmark(
        engine,
        chosen,
        how,
        max_minutes,
        text_file=text_file,
        dtype=dtype,
        cache_dir=cache_dir,
        json_file=json_file,
        plots=plots,
    )


@app.command("plot")
@shows_errors
def plot(
    result: Annotated[Path, typer.Argument(metavar="JSON", help="File written by bench --json.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Directory for the PNG files.")] = Path("plots"),
) -> None:
    """Draw the plots of an earlier benchmark again, and print its table."""
    plot_result(result, output)
