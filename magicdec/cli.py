"""The command line: `magicdec`, `python -m magicdec`, and `build-engine`."""

from typing import Annotated

import typer

from magicdec import __version__
from magicdec.commands import bench, build, demo, generate, inspect, serve, triton_repo, trtllm_check
from magicdec.threads import wait_politely

app = typer.Typer(
    name="magicdec",
    help="Speculative decoding for long contexts: a draft with a bounded KV cache, and the exact output of plain "
    "decoding.\n\nStart with [bold]magicdec demo[/]; your own models: [bold]build[/], [bold]inspect[/], "
    "[bold]generate[/], [bold]serve[/], [bold]bench[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("build", epilog=build.EPILOG)(build.build)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
app.command("inspect", epilog=inspect.EPILOG)(inspect.inspect)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("triton-repo", epilog=triton_repo.EPILOG)(triton_repo.triton_repo)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.add_typer(bench.app, name="bench")
app.command("trtllm-check", epilog=trtllm_check.EPILOG)(trtllm_check.trtllm_check)
app.command("gpu-check", hidden=True)(trtllm_check.trtllm_check)  # its former name


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magicdec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of `magicdec`."""
    wait_politely()
    app()


def build_engine() -> None:
    """Entry point of `build-engine`, which is `magicdec build`."""
    builder = typer.Typer(
        name="build-engine",
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    builder.command("build-engine", epilog=build.EPILOG)(build.build)
    wait_politely()
    builder()
