"""The draft's memory does not grow with the context: read off the allocators, not computed."""

from pathlib import Path
from typing import Any

import pytest

from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.views import CyclicView
from magicdec.runtime.llm import LLM
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.sampling_params import SamplingParams
from tests.support.engines import BLOCK, WINDOW, tiny_pair

CONTEXTS = (1024, 4096, 32768)
SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "hidden_size": 16,
    "max_position_embeddings": 65536,
}


def used_during(llm: LLM, context: int, num_draft_tokens: int) -> tuple[int, int]:
    """(target blocks, draft blocks) in use in the middle of decoding."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, num_draft_tokens=num_draft_tokens, seed=0)
    llm.engine.add_request("r", [5 + i % 100 for i in range(context)], params)
    proposer = llm.engine.drafting.proposer
    target = draft = 0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        target = max(target, llm.engine.blocks.num_used_blocks)
        if isinstance(proposer, ModelProposer) and isinstance(proposer.cache, CyclicView):
            draft = max(draft, proposer.cache.blocks.num_used_blocks)
    llm.engine.check_integrity()
    return target, draft


def test_separate_draft_is_constant(tmp_path: Path) -> None:
    llm = LLM(tiny_pair(tmp_path, "in_cache", max_seq_len=33000, **SHAPE), max_num_tokens=4096)
    pool = llm.memory()["draft_kv_bytes"]
    used = {context: used_during(llm, context, 4)[1] for context in CONTEXTS}
    assert set(used.values()) == {1 + WINDOW // BLOCK + 2}  # sinks, window, two spare
    assert llm.memory()["draft_kv_bytes"] == pool
    assert isinstance(llm.draft_runner, TorchRunner)
    assert pool == llm.draft_runner.cache.keys.nbytes + llm.draft_runner.cache.values.nbytes


@pytest.mark.parametrize("context", CONTEXTS)
def test_self_speculation_adds_nothing(tmp_path: Path, context: int) -> None:
    llm = LLM(tiny_pair(tmp_path, "self", max_seq_len=33000, **SHAPE), max_num_tokens=4096, max_batch_size=1)
    assert llm.memory()["draft_kv_bytes"] == 0
    assert llm.draft_runner is None
    plain, _ = used_during(llm, context, 0)
    speculative, draft = used_during(llm, context, 4)
    assert (speculative, draft) == (plain, 0)
