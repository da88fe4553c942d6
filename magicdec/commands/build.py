"""`magicdec build`, also installed as `build-engine`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import StageBars, err, shown_warnings, shows_errors

EPILOG = """[bold]Examples[/]

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama

build-engine --target SmolLM2-135M-Instruct --draft self --config smollm2-135m-self --output engines/smollm2

build-engine --target model.gguf --draft ngram --config my.yaml --output engines/mine --dtype float32"""


@shows_errors
def build(
    target: Annotated[
        Path,
        typer.Option(help="Hugging Face directory (safetensors) or GGUF file of the target model.", show_default=False),
    ],
    draft: Annotated[
        str,
        typer.Option(
            metavar="DIR|self|ngram",
            help="Draft model (same tokenizer as the target), [bold]self[/] (the target through a bounded window, no "
            "extra memory) or [bold]ngram[/] (prompt lookup, no model).",
            show_default=False,
        ),
    ],
    config: Annotated[
        str,
        typer.Option(
            help="YAML file with the draft's window, lengths and limits, or a shipped one's name.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory to write; must be new or empty.", show_default=False)],
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks to cut the weights for. Default: the configuration's.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Type of weights and computation. Default: the configuration's."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the engine that --output holds.")] = False,
) -> None:
    """Convert a target and its draft into an engine directory.

    The pair is checked first: tokenizers, lengths, disk, memory.
    A build that stops early leaves nothing that loads.
    """
    from magicdec.builder.build import build_pair
    from magicdec.builder.config import load_config

    with shown_warnings(), StageBars() as bars:
        build_pair(
            target,
            _draft(draft),
            load_config(config),
            output,
            tp_size=tp,
            dtype=dtype,
            overwrite=overwrite,
            on_progress=bars,
        )
    err().print(f"Built {output}. Next: magicdec inspect {output}", soft_wrap=True)


def _draft(text: str) -> Path | Literal["self", "ngram"]:
    if text == "self":
        return "self"
    return "ngram" if text == "ngram" else Path(text)
