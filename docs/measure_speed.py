"""Measures speed, here and against peers, and writes tables and plots of docs/benchmarks.md.

    python docs/measure_speed.py                                  both benchmarks, over an hour each on two cores
    python docs/measure_speed.py --quick                          both, small: does it work here?
    python docs/measure_speed.py --bench b.json --peers p.json    only write the page again

A part whose JSON file is given is not measured again. Arguments behind -- go to `magicdec bench`.
"""

import argparse
import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from magicdec.commands.bench_plots import check_plots, draw_plots
from magicdec.commands.bench_result import BenchResult, load
from magicdec.commands.bench_table import markdown

ROOT = Path(__file__).resolve().parent.parent
PAGE, IMAGES, PEERS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images", ROOT / "benchmarks" / "peers"
BENCH_MARKS = ("<!-- begin of magicdec bench -->", "<!-- end of magicdec bench -->")
PEER_MARKS = ("<!-- begin of peers -->", "<!-- end of peers -->")
GRID = ["--full", "--window", "512", "--window", "1024", "--repeats", "2", "--max-minutes", "90"]
QUICK_GRID = ["--context", "1024", "--context", "2048", "--batch", "1", "--draft-length", "3", "--output-tokens", "16"]
CAPTIONS = {
    "speedup": "Speedup over plain decoding by context, at the best draft length.",
    "throughput": "Tokens a second by batch.",
    "step": "Draft, verification and the host's work in one step.",
    "draft-time": "Time of one draft token by context: flat for a bounded view; a draft that reads the whole context "
    "grows as a plain step does.",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small runs")
    options.add_argument("--bench", type=Path, help="result of magicdec bench to use")
    options.add_argument("--peers", type=Path, help="result of benchmarks/peers/run.py to use")
    options.add_argument("bench_arguments", nargs="*", help="for magicdec bench, behind --")
    args = options.parse_args()
    check_plots()
    results = ROOT / ".cache" / "benchmarks"
    results.mkdir(parents=True, exist_ok=True)
    bench, peers = args.bench or results / "bench.json", args.peers or results / "peers.json"
    if args.bench is None:
        grid = args.bench_arguments or (QUICK_GRID if args.quick else GRID)
        run([sys.executable, "-m", "magicdec", "bench", *grid, "--json", str(bench)])
    if args.peers is None:
        run([sys.executable, str(PEERS / "run.py"), *(["--quick"] if args.quick else []), "--json", str(peers)])
    result = load(bench)
    fill(PAGE, BENCH_MARKS, bench_part(result, IMAGES))
    fill(PAGE, PEER_MARKS, peer_table().markdown(json.loads(peers.read_text(encoding="utf-8"))))


def run(command: list[str]) -> None:
    """In the repository, so that downloads and engines are kept in its .cache."""
    subprocess.run(command, check=True, cwd=ROOT)


def bench_part(result: BenchResult, images: Path) -> str:
    """Plots, drawn into `images`, and the table. Plots of an earlier result are removed."""
    for old in images.glob("*.png"):
        if old.stem.startswith(tuple(CAPTIONS)):
            old.unlink()
    pictures = []
    for path in draw_plots(result, images):
        name = max((name for name in CAPTIONS if path.stem.startswith(name)), key=len)
        pictures.append(f"![{CAPTIONS[name]}](images/{path.name})\n\n{CAPTIONS[name]}{_temperature(path)}\n")
    return "\n".join([*pictures, markdown(result)])


def _temperature(path: Path) -> str:
    return f" Temperature {path.stem.rsplit('-t', 1)[1]}." if path.stem[-3:-1] == "-t" else ""


def fill(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between the marks."""
    before, rest = page.read_text(encoding="utf-8").split(marks[0])
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.split(marks[1])[1]}", encoding="utf-8")


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
