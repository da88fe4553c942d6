"""`magicdec inspect`: what it says is what is allocated."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from magicdec import LLM, SamplingParams, console
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.drafting.model_proposer import ModelProposer
from tests.commands.commands import fail, succeed
from tests.support.engines import tiny_pair


@pytest.mark.parametrize("drafter", ["self", "in_cache", "ngram"])
def test_inspect_equals_the_allocator(tmp_path_factory: pytest.TempPathFactory, drafter: str) -> None:
    directory = tiny_pair(tmp_path_factory.mktemp("inspect"), drafter)  # type: ignore[arg-type]
    data = json.loads(succeed("inspect", directory, "--context", 600, "--batch", 4, "--json").stdout)
    allocated = LLM(directory, kv_cache_tokens=4 * 608, max_batch_size=4).memory()  # 608: whole blocks of 16
    assert data["memory"]["target_kv"] == allocated["target_kv_bytes"]
    assert data["memory"]["draft_kv"] == allocated["draft_kv_bytes"]
    assert (allocated["draft_kv_bytes"] > 0) is (drafter == "in_cache")
    table = succeed("inspect", directory, "--context", 600, "--batch", 4).stdout
    for role, engine in data["engines"].items():
        assert role.capitalize() in table
        assert f"{engine['num_parameters']:,} parameters" in table
    for name in ("target_weights", "draft_weights", "target_kv", "draft_kv", "total"):
        assert console.format_bytes(data["memory"][name]) in table


@pytest.mark.parametrize("drafter", ["self", "in_cache"])
def test_inspect_says_how_much_a_draft_sees(
    tmp_path_factory: pytest.TempPathFactory, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated bound is reached, and never passed, by what draft passes really look at."""
    directory = tiny_pair(tmp_path_factory.mktemp("view"), drafter)  # type: ignore[arg-type]
    said = re.search(r"at most (\d+) tokens", succeed("inspect", directory).stdout)
    assert said is not None
    seen: list[int] = []
    inner = ModelProposer._inputs

    def spy(*args: Any) -> ModelInput:
        inputs = inner(*args)
        seen.extend((inputs.cache_lens + inputs.query_start_loc.diff()).tolist())
        return inputs

    monkeypatch.setattr(ModelProposer, "_inputs", spy)
    LLM(directory).generate([[7] * 200], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert max(seen) == int(said[1])


def test_inspect_refuses_with_value_and_mend(tmp_path: Path) -> None:
    directory = tiny_pair(tmp_path, "self")
    message = fail("inspect", directory, "--context", 5000)
    assert "5000" in message
    assert "1024" in message
    assert "All files match" in succeed("inspect", directory, "--verify").stderr
    weights = directory / "target" / "rank0.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert "rank0.safetensors" in fail("inspect", directory, "--verify")
    weights.write_bytes(damaged[:-8])
    assert "truncated" in fail("inspect", directory)
    assert "pair.json is missing" in fail("inspect", tmp_path / "nothing")
