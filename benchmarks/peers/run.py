"""The same prompts, model and token counts through magicdec and its peers, in one run.

    python benchmarks/peers/run.py --quick
    python benchmarks/peers/run.py --json peers.json

Each peer gets a virtual environment of its own in --cache-dir, made with pip. Each measurement is a process of its own,
which reads the prompts and decodes once; the engines take turns, so that a machine that slows down favours none. A peer
that cannot be installed, and a case that fails or takes too long, is in the result by name, with the reason. Greedy,
without penalties, going on after an end-of-sequence token; tokens/s count decoding only.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from environments import HERE, OURS, PEERS, NotAvailable, Peer, python_of, run, versions_of
from model import gguf_model, huggingface_model
from table import markdown

from magicdec.bench.comparison import machine
from magicdec.bench.demo_pair import prepare_engine, read_long_text
from magicdec.bench.prompts import cut_prompts
from magicdec.runtime.text.tokenizer import HFTokenizer

CASES, QUICK_CASES = ((1, 512), (1, 4096), (1, 7500), (8, 8000)), ((1, 512), (1, 1024))
THREADS = 2


@dataclass
class Entry:
    """What came of one engine, mode and case."""

    engine: str
    mode: str
    batch: int
    context: int
    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the runs."""
        rates = [run["tokens"] / run["decode_seconds"] for run in self.runs]
        return statistics.median(rates) if rates else None


def main() -> None:
    args = options()
    cache = args.cache_dir.resolve()
    engine = prepare_engine(cache, "bfloat16", 8192, quantize_draft="int4")
    models = {
        "engine": str(engine),
        "huggingface": str(huggingface_model(engine, cache / "models", cache / "peers" / "huggingface")),
        "gguf": str(gguf_model(cache / "models", cache / "peers" / "model-bf16.gguf")),
    }
    pythons, missing, versions = prepare(args, cache / "peers", models)
    cases = [tuple(map(int, case.split("x"))) for case in args.case] or (QUICK_CASES if args.quick else CASES)
    for entries in measure(args, cases, pythons, models):  # what is measured is kept, whatever becomes of the next case
        result = {
            "schema_version": 1,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "threads": args.threads,
            "output_tokens": args.output_tokens,
            "repeats": args.repeats,
            "versions": versions,
            "missing": missing,
            "entries": [asdict(entry) | {"tokens_per_second": entry.tokens_per_second} for entry in entries],
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(markdown(result) + "\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens, one run of 8 tokens: does it work?")
    parser.add_argument("--case", action="append", default=[], metavar="BATCHxCONTEXT", help="e.g. 8x8000; repeatable")
    parser.add_argument("--peer", action="append", default=[], choices=[peer.name for peer in PEERS], help="repeatable")
    parser.add_argument("--output-tokens", type=int, default=None, help="decoded in each run (default 64; quick 8)")
    parser.add_argument("--repeats", type=int, default=None, help="runs of each (default 3; quick 1)")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--install-timeout", type=float, default=1800, help="seconds to install or convert for a peer")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"))
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    args = parser.parse_args()
    args.output_tokens = args.output_tokens or (8 if args.quick else 64)
    args.repeats = args.repeats or (1 if args.quick else 3)
    return args


def prepare(
    args: argparse.Namespace, directory: Path, models: dict[str, str]
) -> tuple[dict[str, Path], dict[str, str], dict[str, dict[str, str]]]:
    """(interpreters, reasons of what is missing, versions) by engine; adds OpenVINO's model to `models`."""
    pythons, missing, versions = {OURS.name: python_of(OURS, directory, 0)}, {}, {}
    versions[OURS.name] = versions_of(pythons[OURS.name], OURS)
    for peer in PEERS:
        if args.peer and peer.name not in args.peer:
            missing[peer.name] = "not asked for"
            continue
        try:
            python = python_of(peer, directory / "venvs", args.install_timeout)
            versions[peer.name] = versions_of(python, peer)
            if peer.name == "openvino-genai":
                export_openvino(python, directory / "openvino", models, args.install_timeout)
            pythons[peer.name] = python
        except NotAvailable as error:
            missing[peer.name] = str(error)
            sys.stderr.write(f"{peer.name} is left out: {error}\n")
    return pythons, missing, versions


def export_openvino(python: Path, output: Path, models: dict[str, str], timeout: float) -> None:
    """Convert the checkpoint, in fp16: OpenVINO's exporter knows no bf16."""
    models["openvino"], models["openvino_precision"] = str(output), "float16 weights"
    if (output / "openvino_tokenizer.xml").is_file():
        return
    command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", models["huggingface"]]
    run([*command, "--task", "text-generation-with-past", "--weight-format", "fp16", str(output)], timeout)


def measure(
    args: argparse.Namespace, cases: Any, pythons: dict[str, Path], models: dict[str, str]
) -> Iterator[list[Entry]]:
    """All entries so far, after each case.

    Every engine and mode of a case takes its turn, `repeats` times; what fails once is not tried again.
    """
    tokens = HFTokenizer(Path(models["engine"]) / "target").encode_plain(read_long_text(None))
    entries: list[Entry] = []
    for batch, context in cases:
        prompts = cut_prompts(tokens, context, batch, 0)
        turns = [
            (peer, Entry(peer.name, mode, batch, context))
            for peer in (OURS, *PEERS)
            if peer.name in pythons
            for mode in (peer.modes if batch == 1 else peer.batch_modes)
        ]
        for repeat in range(args.repeats):
            for peer, entry in turns if repeat % 2 == 0 else reversed(turns):
                if entry.error is None:
                    take_turn(args, pythons[peer.name], peer, entry, prompts, models)
        entries += [entry for _, entry in turns]
        yield entries


def take_turn(
    args: argparse.Namespace,
    python: Path,
    peer: Peer,
    entry: Entry,
    prompts: list[list[int]],
    models: dict[str, str],
) -> None:
    """One process; its result or its error goes into the entry."""
    sys.stderr.write(f"{entry.batch} x {entry.context}: {entry.engine}, {entry.mode}\n")
    request = {
        "prompts": prompts,
        "output_tokens": args.output_tokens,
        "mode": entry.mode,
        "threads": args.threads,
        **models,
    }
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "result.json"
        asked.write_text(json.dumps(request))
        try:
            run([str(python), str(HERE / "workers" / peer.worker), str(asked), str(answered)], args.timeout)
            entry.runs.append(json.loads(answered.read_text()))
        except NotAvailable as error:
            entry.error = str(error)


if __name__ == "__main__":
    main()
