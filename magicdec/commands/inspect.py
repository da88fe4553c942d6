"""`magicdec inspect`: what an engine directory holds and what it needs."""

from pathlib import Path
from typing import Annotated

import typer

from magicdec.console import shows_errors
from magicdec.tasks.inspect import show_engine

EPILOG = """[bold]Examples[/]

magicdec inspect engines/pair

magicdec inspect engines/pair --context 32768 --batch 8

magicdec inspect engines/pair --verify --json"""


@shows_errors
def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory made by build-engine.", show_default=False)
    ],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each sequence, for the memory. Default: max_seq_len.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time, for the memory.")] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its SHA-256.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what an engine is made of: models, windows, sizes, and the memory of a context and a batch.

    Only manifests are read; no weights are loaded.
    """
    show_engine(directory, context=context, batch=batch, verify=verify, as_json=as_json)
