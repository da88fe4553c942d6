"""Generation on real ranks: token for token what one rank gives, with every drafter."""

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
        ("llama", "in_cache", None),
        ("llama", "in_cache", 1),
        ("qwen3", "absolute", None),
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
    run_ok(tp_size, "tests.mpi.rank_generate", tmp_path / "results", *engines)
    results = json.loads((tmp_path / "results").read_text())
    assert len(results) == 2 * len(cases)
    expected_of = {family: plain(build(tmp_path, "self", 1, family=family)) for family, _, _ in cases}
    for (family, drafter, _), roomy, tight in zip(cases, results[::2], results[1::2], strict=True):
        expected = expected_of[family]
        assert outcome(roomy) == expected, (family, drafter)
        assert outcome(tight) == expected, (family, drafter)
        assert sum(item["preempted"] for item in tight) > 0
        if drafter != "ngram":
            assert sum(item["accepted"] for item in roomy) > 20, "the drafts must matter for this test"
