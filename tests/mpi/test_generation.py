"""Generation on real ranks: token for token what one rank gives, with every drafter."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from magicdec.runtime.llm import LLM
from tests.engines import Drafter
from tests.mpi.launch import run_ok
from tests.mpi.pairs import PARAMS, PROMPTS, build, summary
from tests.tiny_models import Family

# family, drafter, ranks of a separate draft model
CASES: dict[int, tuple[tuple[Family, Drafter, int | None], ...]] = {
    2: (
        ("llama", "self", None),
        ("llama", "in_cache", 1),
        ("qwen3", "in_cache", None),
        ("qwen2", "ngram", None),
    ),
    4: (("llama", "in_cache", 2),),
}


def plain(engine: Path) -> list[dict[str, Any]]:
    """What one rank gives without drafts."""
    llm = LLM(engine, dtype="float64", num_draft_tokens=0)
    return outcome(summary(llm.generate(PROMPTS, PARAMS)))


def outcome(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: item[key] for key in ("token_ids", "text", "finish_reason")} for item in results]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_output_is_that_of_one_rank(tmp_path: Path, tp_size: int) -> None:
    cases = CASES[tp_size]
    engines = [build(tmp_path, drafter, tp_size, family=family, draft_tp=ranks) for family, drafter, ranks in cases]
    runs = ["roomy", "tight"] if tp_size == 2 else ["tight"]
    run_ok(tp_size, "tests.mpi.rank_generate", tmp_path / "results", *engines, *["--twice"] * (len(runs) - 1))
    results = json.loads((tmp_path / "results").read_text())
    expected_of = {family: plain(build(tmp_path, "self", 1, family=family)) for family, _, _ in cases}
    for ((family, drafter, _), run), result in zip(itertools.product(cases, runs), results, strict=True):
        assert outcome(result) == expected_of[family], (family, drafter, run)
        assert (sum(item["preempted"] for item in result) > 0) == (run == "tight")
        if drafter != "ngram":
            assert sum(item["accepted"] for item in result) > 20, "the drafts must matter for this test"
