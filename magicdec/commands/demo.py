"""`magicdec demo`: a real model answers from a long real text, plain and speculative in one process."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import shows_errors
from magicdec.tasks.demo import DTYPE, QUESTION, Limits, show_demo

EPILOG = """[bold]Examples[/]

magicdec demo

magicdec demo --context 8000 --window 1024 --dtype bfloat16

magicdec demo --text-file book.txt --question "Who tells the story?\""""


@shows_errors
def demo(
    context: Annotated[int, typer.Option(min=256, help="Prompt tokens; the text is cut to fit.")] = 4096,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens at most.")] = 128,
    text_file: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read. Default: the Python language reference.")
    ] = None,
    question: Annotated[str, typer.Option(help="What is asked about the text.")] = QUESTION,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of weights and computation.")] = DTYPE,
    window: Annotated[int | None, typer.Option(help="Draft window in tokens. Default: 512.")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens a round. Default: what is fastest at each step.")
    ] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the model and the engine are kept.")] = Path(".cache"),
) -> None:
    """Download a small model, build a pair, answer from a long text, and compare with plain decoding.

    The draft is the model itself with its weights in int4, looking at the
    text through a bounded window on the model's own KV cache: it has none of
    its own. The closing table is measured in this run.
    """
    limits = Limits(context, max_tokens, window, num_draft_tokens or "auto")
    show_demo(text_file, question, limits, dtype, cache_dir)
