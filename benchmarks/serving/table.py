"""Results of the serving benchmarks as Markdown."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

MIB = 1 << 20


def markdown(result: dict[str, Any]) -> dict[str, str]:
    """By part: load, soak and aiperf, as far as they were measured; each says at its end where and when."""
    parts = {"load": load_table, "soak": soak_table, "aiperf": tool_table}
    tables: dict[str, str] = {}
    for name, table in parts.items():
        if name in result:
            measured = result[name]
            tables[name] = f"{table(measured)}\n\nServer: `{measured['options']}`. {measured['where']}."
    return tables


def load_table(load: dict[str, Any]) -> str:
    """A row a figure, a column a way; medians over the runs, with the lowest and highest in brackets."""
    runs = load["runs"]
    ways = list(runs)
    rows = [
        ("output tokens/s", lambda run: run["tokens_per_second"], "{:.1f}"),
        ("requests/s", lambda run: run["requests_per_second"], "{:.2f}"),
        *_percentiles("time to first token", "time_to_first_token", 1, "s"),
        *_percentiles("inter-token latency", "inter_token_latency", 1000, "ms"),
        *_percentiles("time per output token", "time_per_output_token", 1000, "ms"),
        *_percentiles("whole request", "request_latency", 1, "s"),
        ("acceptance length", lambda run: run["acceptance_length"], "{:.2f}"),
        ("drafts accepted", lambda run: run["acceptance_rate"], "{:.0%}"),
        ("draft tokens a step, mean", _mean_draft, "{:.2f}"),
        ("prompt tokens found in the cache", lambda run: run["prefix_hits"], "{:,.0f}"),
        ("preemptions", lambda run: run["preemptions"], "{:,.0f}"),
        ("errors", lambda run: len(run["errors"]), "{:.0f}"),
    ]
    lines = [f"| | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for name, value, form in rows:
        lines.append(f"| {name} | {' | '.join(_cell([value(run) for run in runs[way]], form) for way in ways)} |")
    before, after = load["free_blocks"]
    total = load["requests"]
    lines += [
        "",
        f"{total} requests with prompts of {load['prompt_tokens']:,} tokens and {load['output_tokens']} output tokens, "
        f"{load['concurrency']} at a time; medians of {len(runs[ways[0]])} runs of each way in turn. The same text in "
        f"all runs: {load['same_texts']} of {total}. KV blocks free before and after: {before:,.0f}, {after:,.0f}.",
    ]
    return "\n".join(lines)


def soak_table(soak: dict[str, Any]) -> str:
    """What was asked, and memory over the run."""
    memory, (before, after) = soak["memory"], soak["free_blocks"]
    shares = (0, 0.25, 0.5, 0.75, 1)
    marks = [memory[round(share * (len(memory) - 1))] / MIB for share in shares]
    rows = [
        ("requests", f"{soak['requests']:,}, {soak['concurrency']} at a time, in {soak['seconds']:.0f} s"),
        ("output tokens", f"{soak['tokens']:,.0f}"),
        ("left by the client", f"{soak['cancelled']:,} ({soak['aborted']:,.0f} before their end)"),
        ("errors", f"{len(soak['errors'])}"),
        ("KV blocks free before, after", f"{before:,.0f}, {after:,.0f}"),
        ("resident MiB at 0, 25, 50, 75, 100 %", ", ".join(f"{mark:,.1f}" for mark in marks)),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def tool_table(tool: dict[str, Any]) -> str:
    """The tool's own figures."""
    lines = [f"| {tool['tool']} | average | median | 99th percentile |", "|---|---|---|---|"]
    for name, (average, median, high, unit) in tool["metrics"].items():
        lines.append(f"| {name}, {unit} | {average:,.1f} | {median:,.1f} | {high:,.1f} |")
    totals = ", ".join(f"{value:,.2f} {name}" for name, value in tool["totals"].items() if name != "requests")
    lines += [
        "",
        f"{tool['totals']['requests']:.0f} requests, {tool['concurrency']} at a time: {totals}, "
        f"{tool['errors']:.0f} errors.",
    ]
    return "\n".join(lines)


_Row = tuple[str, Callable[[dict[str, Any]], Any], str]


def _percentiles(name: str, key: str, factor: float, unit: str) -> list[_Row]:
    def part(index: int) -> Callable[[dict[str, Any]], Any]:
        return lambda run: None if run[key] is None else factor * run[key][index]

    form = "{:.2f}" if unit == "s" else "{:.1f}"
    return [(f"{name} p50, {unit}", part(0), form), (f"{name} p99, {unit}", part(1), form)]


def _mean_draft(run: dict[str, Any]) -> float | None:
    steps = sum(run["draft_lengths"].values())
    return sum(int(length) * count for length, count in run["draft_lengths"].items()) / steps if steps else None


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    median, low, high = (form.format(number) for number in (statistics.median(known), min(known), max(known)))
    return median if low == high else f"{median} ({low}-{high})"
