"""Run on every rank: python -m tests.mpi.rank_generate OUTPUT ENGINE... decodes the same requests with each engine.

Every engine twice: four at a time, and with so little memory that requests are preempted. Writes JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from magicdec.runtime.llm import LLM
from tests.mpi.pairs import PARAMS, PROMPTS, summary

TIGHT: dict[str, Any] = {"kv_cache_tokens": 256, "max_num_tokens": 17}


def main() -> None:
    output, *engines = [Path(arg) for arg in sys.argv[1:]]
    results = []
    for engine in engines:
        for options in ({}, TIGHT):
            llm = LLM(engine, dtype="float64", num_draft_tokens=3, **options)
            results.append(summary(llm.generate(PROMPTS, PARAMS)))
            llm.engine.check_integrity()
            print("done", engine.name, "tight" if options else "", flush=True)  # noqa: T201
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
