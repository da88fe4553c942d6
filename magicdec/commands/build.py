"""`magicdec build`, also installed as `build-engine`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import StageBars, err, shown_warnings, shows_errors

EPILOG = """[bold]Examples[/]

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama

build-engine --target SmolLM2-135M-Instruct --draft self --config smollm2-135m-self --output engines/smollm2

build-engine --target model.gguf --draft ngram --config my.yaml --output engines/mine --dtype float32

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama-fp8 \
--quantize-target fp8 --kv-cache-dtype fp8"""
KV_DTYPES = Literal["auto", "bfloat16", "float16", "float32", "fp8"]


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
    quantize_target: Annotated[
        Literal["none", "fp8"] | None,
        typer.Option(help="Linear layers of the target in FP8 (E4M3), or not. Default: the configuration's."),
    ] = None,
    quantize_draft: Annotated[
        Literal["none", "fp8"] | None,
        typer.Option(help="Linear layers of a separate draft model. Default: the configuration's."),
    ] = None,
    kv_cache_dtype: Annotated[
        KV_DTYPES | None, typer.Option(help="Type of the target's KV cache. Default: the configuration's.")
    ] = None,
    draft_kv_cache_dtype: Annotated[
        KV_DTYPES | None, typer.Option(help="Type of a separate draft model's KV cache. Default: the configuration's.")
    ] = None,
    calibration_file: Annotated[
        Path | None,
        typer.Option(help="Text (UTF-8) that FP8 scales are made from. Default: Python's language topics."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the engine that --output holds.")] = False,
) -> None:
    """Convert a target and its draft into an engine directory.

    The pair is checked first: tokenizers, lengths, disk, memory.
    A build that stops early leaves nothing that loads.
    """
    from magicdec.builder.build import build_pair
    from magicdec.builder.config import load_config, resolve_config

    with shown_warnings(), StageBars() as bars:
        source = _draft(draft)
        resolved = resolve_config(
            load_config(config),
            kind="model" if isinstance(source, Path) else source,
            dtype=dtype,
            tp_size=tp,
            quantize_target=quantize_target,
            quantize_draft=quantize_draft,
            kv_cache_dtype=kv_cache_dtype,
            draft_kv_cache_dtype=draft_kv_cache_dtype,
        )
        build_pair(
            target,
            source,
            resolved,
            output,
            calibration_file=calibration_file,
            overwrite=overwrite,
            on_progress=bars,
        )
    err().print(f"Built {output}. Next: magicdec inspect {output}", soft_wrap=True)


def _draft(text: str) -> Path | Literal["self", "ngram"]:
    if text == "self":
        return "self"
    return "ngram" if text == "ngram" else Path(text)
