"""Measures speed, here and against peers, and writes tables and plots of docs/benchmarks.md.

    python benchmarks/pages/measure_speed.py             all of it: over two hours on two cores
    python benchmarks/pages/measure_speed.py --quick     all of it, small: does it work here?
    python benchmarks/pages/measure_speed.py --bench b.json --auto a.json --windows w.json --peers p.json   write only

A part whose JSON file is given is not measured again. Arguments behind -- go to the first `magicdec bench`.
"""

import json
import statistics
import sys
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from frame import DOCS, ROOT, fill, options_of, run

from magicdec.bench.plots import check_plots, draw_plots
from magicdec.bench.result import BenchResult, Cell, load
from magicdec.bench.stats import auto_shares, choices, speedup_here
from magicdec.bench.table import PROJECTED, markdown, notes

PAGE, IMAGES, PEERS = DOCS / "benchmarks.md", DOCS / "images", ROOT / "benchmarks" / "peers"
BENCH_MARKS = ("<!-- begin of magicdec bench -->", "<!-- end of magicdec bench -->")
PEER_MARKS = ("<!-- begin of peers -->", "<!-- end of peers -->")
AUTO_MARKS = ("<!-- begin of auto -->", "<!-- end of auto -->")
WINDOW_MARKS = ("<!-- begin of windows -->", "<!-- end of windows -->")
GRID = ["--full", "--window", "512", "--draft-length", "3", "--draft-length", "5", "--output-tokens", "96"]
GRID += ["--max-minutes", "90"]
AUTO_GRID = [*GRID, "--repeats", "4", "--drafter", "self-int4", "--drafter", "auto"]
GRID += ["--repeats", "2"]
GRID += [part for drafter in ("self", "self-int4", "self-full") for part in ("--drafter", drafter)]
WINDOW_GRID = ["--full", "--draft-length", "3", "--output-tokens", "48", "--repeats", "1", "--max-minutes", "60"]
WINDOW_GRID += ["--drafter", "self-int4"]
QUICK_GRID = ["--context", "1024", "--context", "2048", "--batch", "1", "--draft-length", "3", "--output-tokens", "16"]
QUICK_AUTO_GRID = [*QUICK_GRID, "--drafter", "self-int4", "--drafter", "auto"]
QUICK_WINDOW_GRID = [*QUICK_GRID, "--window", "256", "--window", "512"]
AIM = 0.97  # of the best
CAPTIONS = {
    "speedup": "Speedup over plain decoding by context, at the best draft length.",
    "throughput": "Tokens a second by batch.",
    "step": "Draft, verification and the host's work in one step.",
    "draft-time": "Time of one draft token by context: flat for a bounded view; a draft that reads the whole context "
    "grows as a plain step does.",
}


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--quick", action="store_true", help="small runs")
    options.add_argument("--bench", type=Path, help="result of magicdec bench to use")
    options.add_argument("--auto", type=Path, help="result of magicdec bench with the drafter auto to use")
    options.add_argument("--windows", type=Path, help="result of magicdec bench over several windows to use")
    options.add_argument("--peers", type=Path, help="result of benchmarks/peers/run.py to use")
    options.add_argument("bench_arguments", nargs="*", help="for magicdec bench, behind --")
    args = options.parse_args()
    check_plots()
    results = ROOT / ".cache" / "benchmarks"
    results.mkdir(parents=True, exist_ok=True)
    bench, auto, windows, peers = (results / f"{name}.json" for name in ("bench", "auto", "windows", "peers"))
    if args.bench is None:
        measure(args.bench_arguments or (QUICK_GRID if args.quick else GRID), bench)
    if args.auto is None:
        measure(QUICK_AUTO_GRID if args.quick else AUTO_GRID, auto)
    if args.windows is None:
        measure(QUICK_WINDOW_GRID if args.quick else WINDOW_GRID, windows)
    if args.peers is None:
        run([sys.executable, str(PEERS / "run.py"), *(["--quick"] if args.quick else []), "--json", str(peers)])
    fill(PAGE, BENCH_MARKS, bench_part(load(args.bench or bench), IMAGES))
    fill(PAGE, AUTO_MARKS, auto_part(load(args.auto or auto)))
    fill(PAGE, WINDOW_MARKS, windows_part(load(args.windows or windows)))
    fill(PAGE, PEER_MARKS, peer_table().markdown(json.loads((args.peers or peers).read_text(encoding="utf-8"))))


def measure(grid: list[str], result: Path) -> None:
    """`magicdec bench` over this grid."""
    run([sys.executable, "-m", "magicdec", "bench", *grid, "--json", str(result)])


def bench_part(result: BenchResult, images: Path) -> str:
    """Plots, drawn into `images`, and the table. Plots of an earlier result are removed."""
    for old in images.glob("*.png"):
        if old.stem.startswith(tuple(CAPTIONS)):
            old.unlink()
    pictures = []
    for path in draw_plots(result, images):
        name = max((name for name in CAPTIONS if path.stem.startswith(name)), key=len)
        pictures.append(f"![{CAPTIONS[name]}](images/{path.name})\n\n{CAPTIONS[name]}{_temperature(path)}\n")
    table, notes = markdown(result).split("\n\n", 1)
    folded = f"<details>\n<summary>All {len(result.cells)} rows</summary>\n\n{table}\n\n</details>\n"
    return "\n".join([*pictures, folded, notes])


def auto_part(result: BenchResult) -> str:
    """Speedups of auto and of the best of what it could have chosen, a row for each point of the grid."""
    heads = ["context", "batch", "T", "best of the others", "its speedup", "auto's speedup", "auto / best"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    shares = auto_shares(result.cells)
    for auto, share in shares:
        best = max(choices(auto, result.cells), key=speedup_here)
        name = "plain decoding" if best.drafter == "none" else best.name
        point = [f"{auto.context:,}", str(auto.batch), f"{auto.temperature:g}"]
        rates = [f"{speedup_here(best):.2f}", f"{speedup_here(auto):.2f}", f"{share:.2f}"]
        lines.append(f"| {' | '.join([*point, name, *rates])} |")
    met = sum(share >= AIM for _, share in shares)
    median = statistics.median(share for _, share in shares)
    lines += ["", f"At {met} of {len(shares)} points auto reaches {AIM} or more; median {median:.2f}.\n"]
    return "\n".join([*lines, how_measured(result)])


def windows_part(result: BenchResult) -> str:
    """Speedups by window: a row for each point of the grid, a column for each way; the best of a row is in bold."""
    ways = list(dict.fromkeys(cell.name for cell in result.cells if cell.drafter != "none"))
    rows: dict[tuple[str, ...], dict[str, Cell]] = defaultdict(dict)
    for cell in result.cells:
        rows[f"{cell.context:,}", str(cell.batch), f"{cell.temperature:g}"][cell.name] = cell
    heads = ["context", "batch", "T", *ways]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for point, cells in rows.items():
        speedups = {way: cells[way].speedup for way in ways if way in cells}
        best = max((speedup for speedup in speedups.values() if speedup is not None), default=None)
        shown = [_speedup(cells.get(way), best) for way in ways]
        lines.append(f"| {' | '.join([*point, *shown])} |")
    return "\n".join([*lines, "", how_measured(result)])


def how_measured(result: BenchResult) -> str:
    """What differs from the first table's notes."""
    settings = result.settings
    return f"{settings.repeats} run(s) of {settings.output_tokens} output tokens. {notes(result)[-1]}"


def _speedup(cell: Cell | None, best: float | None) -> str:
    if cell is None or cell.speedup is None:
        return ""
    text = f"{PROJECTED if cell.beyond_trained_len else ''}{cell.speedup:.2f}"
    return f"**{text}**" if cell.speedup == best else text


def _temperature(path: Path) -> str:
    return f" Temperature {path.stem.rsplit('-t', 1)[1]}." if path.stem[-3:-1] == "-t" else ""


def peer_table() -> ModuleType:
    """The module that makes the peers' table; a script's neighbour, so it is in no package."""
    spec = spec_from_file_location("peer_table", PEERS / "table.py")
    assert spec is not None, "the file is part of the repository"
    assert spec.loader is not None, "it is a Python file"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
