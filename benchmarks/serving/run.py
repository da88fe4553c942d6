"""Load on `magicdec serve`: SmolLM2, real HTTP, streaming.

    python benchmarks/serving/run.py --quick              does it work here?
    python benchmarks/serving/run.py --json serving.json  load, soak and aiperf: a quarter of an hour on two cores

load: long prompts, plain and speculative in turn on one server, by a client of its own. soak: thousands of short
requests, many given up at random. aiperf: the same server under NVIDIA's load generator, which gets a virtual
environment of its own in --cache-dir (1.2 GB).

Ends with exit code 1 if a request failed, a KV block was lost, texts differed between ways, or memory grew.
"""

# ruff: noqa: E402 - threads are told how to wait before PyTorch starts them
import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from magicdec.threads import wait_politely

wait_politely()

import public_tool
from load import Load, measure_load
from server import Server
from soak import measure_soak
from table import markdown

from magicdec.bench.comparison import machine
from magicdec.bench.demo_pair import prepare_engine, read_long_text
from magicdec.bench.prompts import cut_prompts
from magicdec.runtime.text.tokenizer import HFTokenizer

PARTS = ("load", "soak", "aiperf")
MODEL = "smollm2"
SPARE = 64  # tokens of KV for a sequence beyond prompt and output: drafts, and the rest of a block
MAX_GROWTH = 0.05  # of memory, from a quarter of the soak to its end; the allocator takes that long to settle


def main() -> int:
    args = options()
    cache = args.cache_dir.resolve()
    engine = args.engine or prepare_engine(cache, "bfloat16", 8192, quantize_draft="int4")
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    for part in args.part or PARTS:
        sys.stderr.write(f"{part}\n")
        result[part] = {"quick": args.quick, **measure(part, args, engine, cache / "serving")}
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for text in markdown({part: result[part] for part in args.part or PARTS}).values():
        sys.stdout.write(f"{text}\n\n")
    failures = [failure for part in args.part or PARTS for failure in failures_of(part, result[part])]
    sys.stderr.writelines(f"FAILED: {failure}\n" for failure in failures)
    return 1 if failures else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small runs; what is given beside it still counts")
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="repeatable; default: all")
    parser.add_argument("--engine", type=Path, help="default: SmolLM2 with int4 drafts, built if need be")
    parser.add_argument("--requests", type=int, help="of load and aiperf (64; quick 6)")
    parser.add_argument("--concurrency", type=int, help="of all parts (16; quick 3)")
    parser.add_argument("--prompt-tokens", type=int, help="of load and aiperf (2048; quick 128)")
    parser.add_argument("--output-tokens", type=int, help="of load and aiperf (256; quick 12)")
    parser.add_argument("--repeats", type=int, help="runs of each way of load (2; quick 1)")
    parser.add_argument("--soak-requests", type=int, help="(2000; quick 60)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="of load's way that fixes them")
    parser.add_argument("--max-num-tokens", type=int, default=512, help="rows of one target pass")
    parser.add_argument("--install-timeout", type=float, default=1800, help="seconds to install aiperf")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"))
    parser.add_argument("--json", type=Path, help="result; parts that are not measured now stay in it")
    args = parser.parse_args()
    full = {"requests": 64, "concurrency": 16, "prompt_tokens": 2048, "output_tokens": 256, "repeats": 2}
    quick = {"requests": 6, "concurrency": 3, "prompt_tokens": 128, "output_tokens": 12, "repeats": 1}
    for name, value in ((quick | {"soak_requests": 60}) if args.quick else (full | {"soak_requests": 2000})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def measure(part: str, args: argparse.Namespace, engine: Path, directory: Path) -> dict[str, Any]:
    """On a server of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    tool = public_tool.install(directory, args.install_timeout) if part == "aiperf" else None
    given = server_options(part, args)
    with Server(engine, [*given, "--log-level", "warning"], directory / f"{part}.log") as server:
        if part == "load":
            tokens = HFTokenizer(engine / "target").encode_plain(read_long_text(None))
            prompts = cut_prompts(tokens, args.prompt_tokens, args.requests, 0)
            load = Load(args.concurrency, args.output_tokens, args.repeats, args.draft_tokens)
            found = measure_load(server, MODEL, prompts, load)
        elif part == "soak":
            found = measure_soak(server, MODEL, args.soak_requests, args.concurrency)
        else:
            assert tool is not None, "it was installed above"
            names = ("requests", "concurrency", "prompt_tokens", "output_tokens")
            size = {name: getattr(args, name) for name in names}
            with tempfile.TemporaryDirectory() as work:
                found = public_tool.measure(tool, server, MODEL, engine / "target", Path(work), size)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return found | {"options": " ".join(given), "where": f"{machine()}; {now}"}


def server_options(part: str, args: argparse.Namespace) -> list[str]:
    """As many slots as requests come at a time, and a KV cache that holds them and little more."""
    each = 160 if part == "soak" else args.prompt_tokens + args.output_tokens + SPARE
    return [
        *("--served-model-name", MODEL, "--num-draft-tokens", "auto"),
        *("--max-batch-size", str(args.concurrency), "--max-num-tokens", str(args.max_num_tokens)),
        *("--kv-cache-tokens", str(args.concurrency * each)),
    ]


def failures_of(part: str, found: dict[str, Any]) -> list[str]:
    """What should not have happened."""
    if part == "aiperf":
        return [f"aiperf counts {found['errors']:.0f} errors"] if found["errors"] else []
    failures = []
    errors = (
        found["errors"] if part == "soak" else [e for runs in found["runs"].values() for r in runs for e in r["errors"]]
    )
    if errors:
        failures.append(f"{part}: {len(errors)} requests, the first with {errors[0]}")
    before, after = found["free_blocks"]
    if before != after:
        failures.append(f"{part}: {before:.0f} KV blocks were free before, {after:.0f} are now")
    if part == "load" and found["same_texts"] != found["requests"]:
        failures.append(f"load: {found['requests'] - found['same_texts']} texts differ between runs")
    if part == "soak":
        early, late = found["memory"][len(found["memory"]) // 4], found["memory"][-1]
        if late > (1 + MAX_GROWTH) * early and not found["quick"]:
            failures.append(f"soak: memory grew from {early:,} to {late:,} bytes")
    return failures


if __name__ == "__main__":
    sys.exit(main())
