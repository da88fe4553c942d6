"""`magicdec gpu-check`: build and check TensorRT-LLM engines on this machine's GPU, with one report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from magicdec.console import err, shown_warnings, shows_errors

if TYPE_CHECKING:
    from magicdec.gpu_checks import Check, Plan, Rows

EPILOG = """[bold]Examples[/]

magicdec gpu-check

magicdec gpu-check --target Llama-3.2-1B --context 16384 --output report.md"""
CONFIG = "smollm2-135m-self"
FAILED = 1


@shows_errors
def gpu_check(
    output: Annotated[Path, typer.Option(help="Report to write (Markdown).")] = Path("gpu-check.md"),
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
    from magicdec import gpu_checks

    machine = gpu_checks.describe_gpu()
    with shown_warnings():
        plan = make_plan(target, config, dtype, context, cache_dir)
        checks = gpu_checks.run_checks(plan, lambda what: err().print(what, markup=False))
    output.write_text(format_report(machine, plan, checks), encoding="utf-8")
    failed = [check.name for check in checks if not check.passed]
    err().print(f"Wrote {output}. " + (f"FAILED: {', '.join(failed)}" if failed else "All checks passed."))
    if failed:
        raise typer.Exit(FAILED)


def make_plan(
    target: Path | None, config: str, dtype: Literal["bfloat16", "float16"] | None, context: int, cache_dir: Path
) -> "Plan":
    """Both ways in which a model can draft for itself."""
    from magicdec.builder.checkpoints.fetch import fetch_smollm2
    from magicdec.builder.config import load_config, resolve_config
    from magicdec.commands.demo import read_long_text
    from magicdec.gpu_checks import Plan
    from magicdec.pair.config import PairConfig

    model = target or fetch_smollm2(cache_dir / "models")
    loaded = load_config(config).model_dump() | {"backend": "trtllm", "gpu": None}
    pairs: dict[str, tuple[Path | str, PairConfig]] = {}
    kinds: tuple[tuple[Literal["self", "model"], Path | str], ...] = (("self", "self"), ("model", model))
    for kind, draft in kinds:
        changes = {"draft": loaded["draft"] | {"kind": kind, "sink_positions": None}}
        base = PairConfig.model_validate(loaded | changes)
        pairs[kind] = (draft, resolve_config(base, kind=kind, dtype=dtype))
    return Plan(model, pairs, cache_dir / "gpu-check", read_long_text(None), context=context)


def format_report(machine: "Rows", plan: "Plan", checks: "list[Check]") -> str:
    """Markdown: the machine, and a table for each check."""
    passed = sum(check.passed for check in checks)
    lines = ["# GPU check", "", f"{passed} of {len(checks)} checks passed. Model: {plan.target.name}", ""]
    lines += _table(machine)
    for check in checks:
        lines += [f"## {check.name}: {'passed' if check.passed else 'FAILED'}", "", *_table(check.rows)]
    return "\n".join(lines)


def _table(rows: "Rows") -> list[str]:
    clean = [(name, " ".join(value.replace("|", "/").split())) for name, value in rows]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in clean), ""]
