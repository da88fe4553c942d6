"""`magicdec build`, also installed as `build-engine`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import shows_errors
from magicdec.tasks.build import build_engine, show_plans

EPILOG = """[bold]Examples[/]

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama

build-engine --target SmolLM2-135M-Instruct --draft self --config smollm2-135m-self --output engines/smollm2

build-engine --target SmolLM2-135M-Instruct --draft self --config smollm2-135m-self-int4 --output engines/smollm2-int4

build-engine --target model.gguf --draft ngram --config my.yaml --output engines/mine --dtype float32

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama-fp8 \
--quantize-target fp8 --kv-cache-dtype fp8

build-engine --target Llama-3.1-8B --draft Llama-3.2-1B --config llama-3.1-8b-llama-3.2-1b --output engines/llama-trt \
--backend trtllm --dry-run"""
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
    backend: Annotated[
        Literal["torch", "trtllm"] | None,
        typer.Option(
            help="What executes the engine: PyTorch, or TensorRT-LLM (compiled here, for this machine's kind of GPU). "
            "Default: the configuration's."
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks to cut the weights for. Default: the configuration's.")
    ] = None,
    draft_tp: Annotated[
        int | None,
        typer.Option(
            help="Ranks that a draft model is cut for, the first of the target's. Default: the configuration's, or all."
        ),
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
        Literal["none", "fp8", "int8", "int4"] | None,
        typer.Option(
            help="Linear layers of a separate draft model; with [bold]--draft self[/], int8 or int4 draft with a "
            "smaller copy of the target's weights. Default: the configuration's."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        KV_DTYPES | None, typer.Option(help="Type of the target's KV cache. Default: the configuration's.")
    ] = None,
    draft_kv_cache_dtype: Annotated[
        KV_DTYPES | None, typer.Option(help="Type of a separate draft model's KV cache. Default: the configuration's.")
    ] = None,
    calibration_file: Annotated[
        Path | None,
        typer.Option(
            help="Text (UTF-8) that scales are made from and weights rounded for. Default: Python's language topics."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compile TensorRT-LLM ranks at a time. Default: as many as GPUs."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the pair, show how TensorRT-LLM would build it, and stop.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the engine that --output holds.")] = False,
) -> None:
    """Convert a target and its draft into an engine directory.

    The pair is checked first: tokenizers, lengths, disk, memory.
    A build that stops early leaves nothing that loads.
    """
    changes = {
        "dtype": dtype,
        "tp_size": tp,
        "draft_tp_size": draft_tp,
        "backend": backend,
        "quantize_target": quantize_target,
        "quantize_draft": quantize_draft,
        "kv_cache_dtype": kv_cache_dtype,
        "draft_kv_cache_dtype": draft_kv_cache_dtype,
    }
    if dry_run:
        show_plans(target, draft, config, changes)
    else:
        how = {"calibration_file": calibration_file, "workers": workers, "overwrite": overwrite}
        build_engine(target, draft, config, changes, output, how)
