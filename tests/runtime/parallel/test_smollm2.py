"""A real model on three ranks: SmolLM2 has 9 heads and 3 KV heads."""

import json
from pathlib import Path

import pytest

from magicdec.builder.build import build_pair
from magicdec.builder.config import load_config
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.parallel.launch import run_ranks
from tests.support.smollm2 import smollm2_engine, smollm2_gguf

PROMPT = "The three most important things to know about the history of the printing press are"


@pytest.mark.slow
def test_three_ranks_answer_as_one(tmp_path: Path) -> None:
    config = load_config("smollm2-135m-self")
    engine = build_pair(smollm2_gguf(), "self", config, tmp_path / "engine", dtype="float32", tp_size=3)
    arguments = ["--engine", engine, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", 48, "--json"]
    ended = run_ranks(3, "magicdec", "generate", *arguments, "--num-draft-tokens", 4, timeout=300)
    assert ended.returncode == 0, ended
    answer = json.loads(ended.stdout)
    llm = LLM(smollm2_engine(), num_draft_tokens=0, kv_cache_tokens=1024)
    (expected,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=48))
    assert answer["outputs"][0]["token_ids"] == expected.outputs[0].token_ids
    assert answer["metrics"]["num_accepted_tokens"] > 0
