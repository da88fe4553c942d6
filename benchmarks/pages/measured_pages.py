"""What the scripts that fill pages of docs/ have in common."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

from frame import ROOT, fill

from magicdec.builder.calibrate import CALIBRATION_TOKENS
from magicdec.builder.checkpoints.fetch import fetch_smollm2
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.text.tokenizer import HFTokenizer

DRAFT_LENGTH = 4


def add_sizes(options: argparse.ArgumentParser, *, seeds: int) -> None:
    """Options of an acceptance measurement."""
    options.add_argument("--seeds", type=int, default=seeds, help="sampled runs for each acceptance")
    options.add_argument("--prompts", type=int, default=4, help="in a run")
    options.add_argument("--prompt-tokens", type=int, default=1536)
    options.add_argument("--output-tokens", type=int, default=64)


def fill_as_measured(page: Path, marks: tuple[str, str], lines: Iterable[str]) -> None:
    """Fill the page once all lines are there; they are shown as they come."""
    shown = []
    for line in lines:
        sys.stderr.write(f"{line}\n")
        shown.append(line)
    fill(page, marks, "\n".join(shown))


def smollm2() -> Path:
    """The model of these pages, downloaded unless it is there."""
    return fetch_smollm2(ROOT / ".cache" / "models")


def unseen_tokens(engine: Path) -> list[int]:
    """The tokens of Python's language topics that calibration has not seen."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return HFTokenizer(engine / "target").encode_plain(text)[CALIBRATION_TOKENS:]


def open_pair(engine: Path, args: argparse.Namespace) -> LLM:
    """With room for all prompts, and a fixed draft length."""
    tokens = args.prompts * (args.prompt_tokens + 512)
    return LLM(engine, max_batch_size=args.prompts, kv_cache_tokens=tokens, num_draft_tokens=DRAFT_LENGTH)


def sampled_acceptances(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> list[float]:
    """Under the rejection rule at temperature 1, of each seed."""
    return [
        acceptance(
            llm,
            prompts,
            [
                SamplingParams(
                    seed=100 * seed + index, acceptance="rejection", max_tokens=args.output_tokens, ignore_eos=True
                )
                for index in range(len(prompts))
            ],
        )
        for seed in range(args.seeds)
    ]


def acceptance(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Share of draft tokens that the target accepts."""
    metrics = [output.metrics for output in llm.generate(prompts, params)]
    return sum(m.num_accepted_tokens for m in metrics) / sum(m.num_draft_tokens for m in metrics)
