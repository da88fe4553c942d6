"""Generation on real ranks: token for token what one rank gives, by the same drafts, and the logits behind it."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.runtime.parallel.launch import run_ok
from tests.runtime.parallel.pairs import build
from tests.runtime.parallel.rank_generate import TIGHT, generate
from tests.runtime.parallel.test_logits import assert_same, one_rank
from tests.support.engines import Drafter
from tests.support.tiny_models import Family

# family, drafter, ranks of a separate draft model
CASES: dict[int, tuple[tuple[Family, Drafter, int | None], ...]] = {
    2: (
        ("llama", "self", None),
        ("llama", "in_cache", 1),
        ("qwen3", "in_cache", None),
        ("qwen2", "ngram", None),
    ),
    4: (("qwen2", "in_cache", 2),),
}


@pytest.mark.parametrize("tp_size", [2, 4])  # with 4 ranks, two share each of the 2 KV heads
def test_tokens_drafts_and_preemptions_are_those_of_one_rank(tmp_path: Path, tp_size: int) -> None:
    cases = CASES[tp_size]
    engines = [build(tmp_path, drafter, tp_size, family=family, draft_tp=ranks) for family, drafter, ranks in cases]
    runs = [{}, TIGHT] if tp_size == 2 else [TIGHT]
    run_ok(
        tp_size, "tests.runtime.parallel.rank_generate", tmp_path / "results", *engines, *["--twice"] * (len(runs) - 1)
    )
    results = json.loads((tmp_path / "results").read_text())
    for (family, _, _), mine in zip(cases, torch.load(tmp_path / "results.logits"), strict=True):
        assert_same(mine, one_rank(tmp_path, family))
    for ((family, drafter, _), options), result in zip(itertools.product(cases, runs), results, strict=True):
        assert result == generate(build(tmp_path, drafter, 1, family=family), options), (family, drafter, options)
        assert (sum(item["preempted"] for item in result) > 0) == (options is TIGHT)
        if drafter != "ngram":
            assert sum(item["accepted"] for item in result) > 20, "the drafts must matter for this test"
