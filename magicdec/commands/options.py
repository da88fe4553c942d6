"""Options that several commands have."""

from typing import Annotated, Literal

import typer

SPECULATION = "Speculation"
DrafterOption = Annotated[
    Literal["own", "auto"] | None,
    typer.Option(
        help="With --num-draft-tokens auto: the pair's own drafter, or at each step the fastest of all it has. "
        "Default: the pair's.",
        rich_help_panel=SPECULATION,
    ),
]
WindowOption = Annotated[
    int | None, typer.Option(help="Draft window in tokens (self-speculation only).", rich_help_panel=SPECULATION)
]
