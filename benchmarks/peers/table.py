"""The peers' result as Markdown: tokens/s, and who is ahead at each context."""

from collections.abc import Iterable, Sequence
from typing import Any

OURS = "magicdec"


def markdown(result: dict[str, Any]) -> str:
    """A table with a column a case, then a line a case that names the fastest, then what is missing."""
    entries = result["entries"]
    cases = list(dict.fromkeys((entry["batch"], entry["context"]) for entry in entries))
    ways = list(dict.fromkeys((entry["engine"], entry["mode"]) for entry in entries))
    lines = ["| tokens/s | " + " | ".join(f"{batch} x {context:,}" for batch, context in cases) + " |"]
    lines.append("|---|" + "---|" * len(cases))
    for engine, mode in ways:
        cells = [_cell(entries, engine, mode, case) for case in cases]
        lines.append(f"| {engine}, {mode} | {' | '.join(cells)} |")
    lines += ["", *(f"- {verdict}" for case in cases for verdict in _verdicts(entries, case)), ""]
    lines += [f"- {name} was not measured: {_one_line(why)}" for name, why in result["missing"].items()]
    lines += _failures(entries)
    versions = "; ".join(
        f"{name}: {', '.join(f'{package} {number}' for package, number in each.items())}"
        for name, each in result["versions"].items()
    )
    lines += ["", f"Median of {result['repeats']} runs of {result['output_tokens']} output tokens a sequence, decoding"]
    lines[-1] += f" only, {result['threads']} threads, greedy. {versions}. {_precisions(entries)}"
    lines[-1] += f" Machine: {result['machine']}; {result['created']}."
    return "\n".join(lines)


def _cell(entries: Sequence[dict[str, Any]], engine: str, mode: str, case: tuple[int, int]) -> str:
    for entry in entries:
        if (entry["engine"], entry["mode"], entry["batch"], entry["context"]) == (engine, mode, *case):
            rate = entry["tokens_per_second"]
            return f"{rate:.1f}" if rate is not None else "failed"
    return "not offered"


def _verdicts(entries: Sequence[dict[str, Any]], case: tuple[int, int]) -> Iterable[str]:
    """Plain against plain, and best against best."""
    measured = [e for e in entries if (e["batch"], e["context"]) == case and e["tokens_per_second"]]
    for label, chosen in (
        ("plain", [e for e in measured if e["mode"] == "plain"]),
        ("best mode", measured),
    ):
        ours = max((e for e in chosen if e["engine"] == OURS), key=_rate, default=None)
        peer = max((e for e in chosen if e["engine"] != OURS), key=_rate, default=None)
        if ours is None or peer is None:
            continue
        ratio = _rate(ours) / _rate(peer)
        who = f"{ours['mode']} against {peer['engine']}'s {peer['mode']}"
        verdict = "ahead" if ratio >= 1 else f"BEHIND: {peer['engine']} wins"
        yield f"{case[0]} x {case[1]:,}, {label}: {ratio:.2f} x ({who}): {verdict}"


def _rate(entry: dict[str, Any]) -> float:
    return float(entry["tokens_per_second"])


def _failures(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"- {e['engine']}, {e['mode']}, {e['batch']} x {e['context']:,} failed: {_one_line(e['error'])}"
        for e in entries
        if e["error"] is not None
    ]


def _precisions(entries: Sequence[dict[str, Any]]) -> str:
    found = {e["engine"]: e["runs"][0]["precision"] for e in entries if e["runs"]}
    return "Precision: " + ", ".join(f"{name} {precision}" for name, precision in found.items()) + "."


def _one_line(text: str) -> str:
    return " ".join(text.split())[-200:]
