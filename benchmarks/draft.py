"""Time of a draft token at short and at long contexts, in turns: with a bounded view it should not depend on them.

    python benchmarks/draft.py --context 2048 32768 --batch 1 8 --json draft.json

SmolLM2 with self-speculation, whole rounds of draft and verification, so that drafts find what verification left in the
caches of the processor. The contexts take turns, run by run; figures are medians, ratios are to the first context.
Caches are filled with copies of a real prefix, which takes the time that it takes and means nothing.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from magicdec.threads import wait_politely

wait_politely()  # before torch is imported

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from magicdec.bench.demo_pair import default_engine, read_long_text  # noqa: E402
from magicdec.bench.drafters import make_drafting  # noqa: E402
from magicdec.bench.grid import PLAIN, Way  # noqa: E402
from magicdec.bench.prompts import FILL_FROM, cut_prompts, fill_prompts  # noqa: E402
from magicdec.bench.run import BatchRunner  # noqa: E402
from magicdec.bench.session import device_clock  # noqa: E402
from magicdec.runtime.llm import LLM  # noqa: E402
from magicdec.runtime.sampling_params import SamplingParams  # noqa: E402

TOKENS, ROOM = 32, 64  # output tokens of a run, and room for rounds that overshoot
Millis = dict[tuple[str, int, int], list[float]]  # by drafter, batch and context


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--context", type=int, nargs="+", default=[2048, 32768], help="tokens (2048 32768)")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8], help="sequences (1 4 8)")
    options.add_argument("--window", type=int, default=512, help="tokens that a draft sees (512)")
    options.add_argument("--draft-length", type=int, default=3, help="draft tokens a round (3)")
    options.add_argument("--repeats", type=int, default=5, help="runs at each context (5)")
    options.add_argument("--cache-dir", type=Path, default=Path(".cache"), help="of model and engine (.cache)")
    options.add_argument("--json", type=Path, help="where every run is written")
    args = options.parse_args()
    ways = [Way(drafter, args.window, args.draft_length) for drafter in ("self", "self-int4")]
    measured = measure(ways, args.context, args.batch, args.repeats, args.cache_dir)
    Console().print(table(measured, args.context))
    if args.json is not None:
        rows = [{"drafter": d, "batch": b, "context": c, "draft_ms": ms} for (d, b, c), ms in measured.items()]
        args.json.write_text(json.dumps(rows, indent=1))


def measure(ways: list[Way], contexts: list[int], batches: list[int], repeats: int, cache_dir: Path) -> Millis:
    """Milliseconds of one draft pass, of every run."""
    console = Console(stderr=True)
    directory = default_engine(cache_dir, "bfloat16", max(contexts), TOKENS)
    measured: Millis = defaultdict(list)
    with console.status("Loading the model") as status:
        largest = max(batches)
        room = FILL_FROM + sum(largest * (context + ROOM + TOKENS) for context in contexts)
        llm = LLM(directory, max_batch_size=largest, kv_cache_tokens=room)
        status.update("Filling the KV cache")
        prompts = fill(llm, contexts, largest)
        for repeat in range(repeats):
            for batch in batches:
                for way in ways:
                    runner = BatchRunner(llm.engine, make_drafting(llm, way), device_clock("cpu"))
                    for context in contexts if repeat % 2 else reversed(contexts):
                        status.update(f"{batch} x {context:,} tokens, {way.drafter}, run {repeat + 1}")
                        run, _ = runner.run(prompts[context][:batch], [sampling(way)] * batch, TOKENS)
                        passes = run.steps * (way.draft_length or 0)
                        measured[way.drafter, batch, context].append(1e3 * run.draft_seconds / passes)
    return measured


def fill(llm: LLM, contexts: list[int], batch: int) -> dict[int, list[list[int]]]:
    """Prompts of each context, all of them in the prefix cache."""
    tokens = llm.tokenizer.encode_plain(read_long_text(None))
    source = tokens[:FILL_FROM]
    runner = BatchRunner(llm.engine, make_drafting(llm, PLAIN), device_clock("cpu"))
    single = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, num_draft_tokens=0)
    runner.read([[*source, source[0]]], single, lambda _done, _total: None)
    prompts = {context: cut_prompts(tokens, context, batch, 7 * i) for i, context in enumerate(contexts)}
    for each in prompts.values():
        fill_prompts(llm, source, each)
    return prompts


def sampling(way: Way) -> SamplingParams:
    """Greedy, with room for the whole run."""
    return SamplingParams(temperature=0, max_tokens=TOKENS + ROOM, ignore_eos=True, num_draft_tokens=way.draft_length)


def table(measured: Millis, contexts: list[int]) -> Table:
    """A row a drafter and batch."""
    shown = Table(title="One draft pass", caption="Milliseconds, median (lowest to highest); ratio of the medians.")
    for head in ("drafter", "batch", *(f"{context:,} tokens" for context in contexts), "last / first"):
        shown.add_column(head, justify="left" if head == "drafter" else "right")
    for drafter, batch in dict.fromkeys((drafter, batch) for drafter, batch, _ in measured):
        runs = [measured[drafter, batch, context] for context in contexts]
        medians = [statistics.median(ms) for ms in runs]
        cells = [f"{m:.2f} ({min(ms):.2f}-{max(ms):.2f})" for m, ms in zip(medians, runs, strict=True)]
        shown.add_row(drafter, str(batch), *cells, f"{medians[-1] / medians[0]:.3f}")
    return shown


if __name__ == "__main__":
    main()
