"""Speculation on the native kernels changes nothing in any dtype: token for token, through the whole engine."""

from pathlib import Path

import pytest

from magicdec.plugins.cpu.library import native
from magicdec.plugins.model.native_model import NativeModel
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.conftest import PairFactory
from tests.e2e.test_exactness import PROMPTS
from tests.support.engines import DRAFTERS, Drafter

PARAMS = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)] * 3 + [
    SamplingParams(seed=seed, max_tokens=60, ignore_eos=True) for seed in range(3)
]
_PLAIN: dict[tuple[Path, str], list[list[int]]] = {}


def plain(engine_dir: Path, dtype: str) -> list[list[int]]:
    """Tokens of each request alone, draft length 0, in one chunk."""
    if (engine_dir, dtype) not in _PLAIN:
        llm = LLM(engine_dir, dtype=dtype, num_draft_tokens=0, max_batch_size=1, max_num_tokens=1024)
        if not isinstance(getattr(llm.runner, "model", None), NativeModel):
            assert native() is None
            pytest.skip("the native library was not built")
        outputs = [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        _PLAIN[engine_dir, dtype] = [list(output.outputs[0].token_ids) for output in outputs]
    return _PLAIN[engine_dir, dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(pair: PairFactory, drafter: Drafter, dtype: str) -> None:
    expected = plain(pair(drafter), dtype)
    llm = LLM(pair(drafter), dtype=dtype, num_draft_tokens=4, max_batch_size=4, kv_cache_tokens=320, max_num_tokens=21)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    if drafter != "ngram":
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 50
