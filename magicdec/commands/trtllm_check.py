"""`magicdec trtllm-check`: build and check TensorRT-LLM engines on this machine's GPU, with one report."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.bench.demo_pair import CONFIG
from magicdec.console import shows_errors
from magicdec.tasks.trtllm_check import check_engines

EPILOG = """[bold]Examples[/]

magicdec trtllm-check

magicdec trtllm-check --target Llama-3.2-1B --context 16384 --output report.md"""
FAILED = 1


@shows_errors
def trtllm_check(
    ctx: typer.Context,
    output: Annotated[
        Path | None, typer.Option(help="Report to write (Markdown). Default: the command's name with .md.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Model to check with, as for build. Default: SmolLM2-135M, downloaded.")
    ] = None,
    config: Annotated[str, typer.Option(help="Configuration, as for build.")] = CONFIG,
    dtype: Annotated[
        Literal["bfloat16", "float16"] | None, typer.Option(help="Type of weights. Default: the configuration's.")
    ] = None,
    context: Annotated[int, typer.Option(min=256, help="Prompt tokens.")] = 2048,
    cache_dir: Annotated[Path, typer.Option(help="Where the model and the engines are kept.")] = Path(".cache"),
) -> None:
    """Build pairs with TensorRT-LLM, check that they are exact, and measure them.

    Needs TensorRT-LLM 1.2.1 and an A100, H100 or H200. The model drafts for
    itself twice: through a window on its own cache, and as a separate model
    with a cyclic cache. Everything found goes into one report.
    """
    report = output or Path(f"{ctx.info_name}.md")
    if not check_engines(report, target, config, dtype, context, cache_dir):
        raise typer.Exit(FAILED)
