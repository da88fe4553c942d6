"""Building and checking TensorRT-LLM engines on this machine's GPU, with one report."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from magicdec.bench.demo_pair import read_long_text
from magicdec.console import err, shown_warnings

if TYPE_CHECKING:
    from magicdec.gpu_checks import Check, CheckPlan, Rows


def check_engines(
    report: Path,
    target: Path | None,
    config: str,
    dtype: Literal["bfloat16", "float16"] | None,
    context: int,
    cache_dir: Path,
) -> bool:
    """Run all checks and write the report; whether all passed."""
    from magicdec import gpu_checks

    machine = gpu_checks.describe_gpu()
    with shown_warnings():
        plan = make_plan(target, config, dtype, context, cache_dir)
        checks = gpu_checks.run_checks(plan, lambda what: err().print(what, markup=False))
    report.write_text(format_report(machine, plan, checks), encoding="utf-8")
    failed = [check.name for check in checks if not check.passed]
    err().print(f"Wrote {report}. " + (f"FAILED: {', '.join(failed)}" if failed else "All checks passed."))
    return not failed


def make_plan(
    target: Path | None, config: str, dtype: Literal["bfloat16", "float16"] | None, context: int, cache_dir: Path
) -> "CheckPlan":
    """Both ways in which a model can draft for itself."""
    from magicdec.builder.checkpoints.fetch import fetch_smollm2
    from magicdec.builder.config import load_config, resolve_config
    from magicdec.gpu_checks import CheckPlan
    from magicdec.pair.config import PairConfig

    model = target or fetch_smollm2(cache_dir / "models")
    loaded = load_config(config).model_dump() | {"backend": "trtllm", "gpu": None}
    pairs: dict[str, tuple[Path | str, PairConfig]] = {}
    kinds: tuple[tuple[Literal["self", "model"], Path | str], ...] = (("self", "self"), ("model", model))
    for kind, draft in kinds:
        changes = {"draft": loaded["draft"] | {"kind": kind, "sink_positions": None}}
        base = PairConfig.model_validate(loaded | changes)
        pairs[kind] = (draft, resolve_config(base, kind=kind, dtype=dtype))
    return CheckPlan(model, pairs, cache_dir / "gpu-check", read_long_text(None), context=context)


def format_report(machine: "Rows", plan: "CheckPlan", checks: "list[Check]") -> str:
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
