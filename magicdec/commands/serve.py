"""`magicdec serve`: a pair behind an OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.commands.options import SPECULATION, DrafterOption, WindowOption
from magicdec.console import shows_errors
from magicdec.tasks.serve import KEY_VARIABLE, Address, ServingLimits, serve_pair

ADDRESS = "Address and access"
LIMITS = "Limits"
ENGINE = "Engine"
MIB = 1 << 20
EPILOG = """[bold]Endpoints[/]

/ (a page for a browser, which shows what speculation does); /v1/completions, /v1/chat/completions (with
"stream": true as server-sent events), /v1/models; /health, /ready, /metrics (Prometheus), /version.

Beside OpenAI's fields: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, bad_words,
num_draft_tokens and acceptance. A field that is not supported is refused by name.

SIGTERM or Ctrl-C: open requests end within --drain-timeout, new ones get 503; a second one ends all at once.

[bold]Examples[/]

magicdec serve --engine engines/pair

MAGICDEC_API_KEY=secret magicdec serve --engine engines/pair --host 0.0.0.0 --port 80 --request-timeout 300

magicdec serve --engine engines/pair --num-draft-tokens auto --max-batch-size 16"""


@shows_errors
def serve(
    engine: Annotated[Path, typer.Option(help="Directory made by build-engine.", show_default=False)],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.", rich_help_panel=ADDRESS)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.", rich_help_panel=ADDRESS)
    ] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="Model that requests name. Default: the pair's name.", rich_help_panel=ADDRESS
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="Bearer key that /v1 asks for; repeatable (in the environment: separated by spaces). A command line "
            "is seen by all users of a machine, the environment is not.",
            rich_help_panel=ADDRESS,
        ),
    ] = None,
    max_queue_size: Annotated[
        int, typer.Option(min=1, help="Open requests, running or waiting; then 429.", rich_help_panel=LIMITS)
    ] = 256,
    request_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a request is ended with 504. Default: none.", rich_help_panel=LIMITS),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that open requests have after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30,
    max_body_mib: Annotated[
        int, typer.Option(min=1, help="Size of a request's body in MiB; then 413.", rich_help_panel=LIMITS)
    ] = 4,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt; then 400. Default: max_seq_len - 1.", rich_help_panel=LIMITS),
    ] = None,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Draft tokens a round where a request says nothing; 0 is plain decoding, auto is what is fastest at "
            "each step. Default: the pair's own.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    drafter: DrafterOption = None,
    window_size: WindowOption = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in one step. Default: as built.", rich_help_panel=ENGINE)
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(min=1, help="Rows of one target pass. Default: as built.", rich_help_panel=ENGINE)
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=2, help="Prompt and output in tokens. Default: as built.", rich_help_panel=ENGINE)
    ] = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of the target's KV cache. Default: what max_batch_size sequences of max_seq_len need, within "
            "half of the free memory.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Compute in this type instead of the one that was built.", rich_help_panel=ENGINE),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="PyTorch device. Default: cpu, or cuda for a pair that TensorRT-LLM compiled.", rich_help_panel=ENGINE
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged, to stderr.")
    ] = "info",
) -> None:
    """Serve a built pair to OpenAI's clients, over HTTP.

    Requests are batched in flight, and each gets the output that it would get alone. When connections are taken, a
    line on stderr says where, and how to try it.
    """
    limits = ServingLimits(max_queue_size, max_body_mib * MIB, max_prompt_tokens, request_timeout, drain_timeout)
    options = {
        "num_draft_tokens": num_draft_tokens,
        "drafter": drafter,
        "window_size": window_size,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
        "kv_cache_tokens": kv_cache_tokens,
        "dtype": dtype,
        "device": device,
    }
    serve_pair(engine, options, limits, Address(host, port, model_name, tuple(api_key or ())), log_level=log_level)
