"""`magicdec triton-repo`: an engine as models of Triton Inference Server."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.console import err, shows_errors
from magicdec.tasks.options import draft_length

EPILOG = """[bold]Examples[/]

magicdec triton-repo --engine engines/pair --output models

magicdec triton-repo --engine engines/pair --output models --no-decoupled --num-draft-tokens 0 --overwrite

tritonserver --model-repository=models --disable-auto-complete-config"""
ENGINE = "Engine (default: as it was built)"


@shows_errors
def triton_repo(
    engine: Annotated[Path, typer.Option(help="Directory made by build-engine.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Model repository to write; must be new or empty.", show_default=False)],
    decoupled: Annotated[
        bool,
        typer.Option(help="Many responses a request: streaming needs it. Without it, one response, also over HTTP."),
    ] = True,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts in one request. Default: the engine's max_batch_size.")
    ] = None,
    max_queue_size: Annotated[
        int, typer.Option(min=1, help="Prompts that may be open at once; more are refused.")
    ] = 256,
    exclude_input_in_output: Annotated[
        bool,
        typer.Option(
            "--exclude-input-in-output", help="Outputs leave the prompt out, unless a request says otherwise."
        ),
    ] = False,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Draft tokens a round; 0 is plain decoding, auto is what is fastest at each step.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    drafter: Annotated[
        Literal["own", "auto"] | None,
        typer.Option(help="With --num-draft-tokens auto: the pair's own drafter, or any.", rich_help_panel=ENGINE),
    ] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the target's KV cache.", rich_help_panel=ENGINE)
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Compute in this type.", rich_help_panel=ENGINE),
    ] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device.", rich_help_panel=ENGINE)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the models that --output holds.")] = False,
) -> None:
    """Write a model repository for Triton Inference Server.

    Its models have the names and tensors of NVIDIA's TensorRT-LLM backend,
    so that clients of that backend work with them.
    """
    from magicdec.runtime.triton_backend.parameters import LLMParameters
    from magicdec.runtime.triton_backend.repository import MODELS, write_repository

    parameters = LLMParameters(
        engine_dir=engine,
        exclude_input_in_output=exclude_input_in_output,
        max_queue_size=max_queue_size,
        kv_cache_tokens=kv_cache_tokens,
        num_draft_tokens=draft_length(num_draft_tokens),
        drafter=drafter,
        dtype=dtype,
        device=device,
    )
    write_repository(output, parameters, decoupled=decoupled, max_batch_size=max_batch_size, overwrite=overwrite)
    err().print(
        f"Wrote {', '.join(MODELS)} to {output}. Next: tritonserver --model-repository={output} "
        "--disable-auto-complete-config",
        soft_wrap=True,
    )
