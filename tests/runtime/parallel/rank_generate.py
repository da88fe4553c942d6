"""Run on every rank as tests.runtime.parallel.rank_generate OUTPUT ENGINE... decodes the same requests with each.

Four at a time, with so little memory that requests are preempted; with --twice before that with enough. Writes JSON,
and each target's logits of `passes()` beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from magicdec.runtime.llm import LLM
from magicdec.runtime.parallel.leader import join_ranks
from tests.runtime.parallel.pairs import PARAMS, PROMPTS, summary
from tests.runtime.parallel.rank_logits import logits

TIGHT: dict[str, Any] = {"kv_cache_tokens": 256, "max_num_tokens": 17}


def main() -> None:
    output, *engines = [Path(arg) for arg in sys.argv[1:] if arg != "--twice"]
    runs: tuple[dict[str, Any], ...] = ({}, TIGHT) if "--twice" in sys.argv else (TIGHT,)
    leader = join_ranks()
    assert leader is not None
    torch.save([logits(leader, engine) for engine in engines], output.with_suffix(".logits"))
    output.write_text(json.dumps([generate(engine, options) for engine in engines for options in runs]))


def generate(engine: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What PROMPTS are answered with, and how."""
    llm = LLM(engine, dtype="float64", num_draft_tokens=3, **options)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    return summary(outputs)


if __name__ == "__main__":
    main()
