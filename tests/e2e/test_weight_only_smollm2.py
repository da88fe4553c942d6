"""The real model drafting for itself in int4: what its Q4_1 file loses by it, and that its output stays what it is."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file

from magicdec.builder.build import build_pair
from magicdec.builder.config import load_config
from magicdec.plugins.model.native_model import NativeModel
from magicdec.plugins.weight_only import from_int4
from magicdec.runtime.llm import LLM
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.test_exactness import accepted
from tests.support.smollm2 import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_threads")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_config("smollm2-135m-self-int4")
    return build_pair(smollm2_gguf(), "self", config, tmp_path_factory.mktemp("int4") / "pair")


def test_q4_1_weights_come_through_as_they_were(engine: Path) -> None:
    """To the rounding of the target's own copy to bfloat16."""
    target, draft = (load_file(engine / role / "rank0.safetensors") for role in ("target", "draft"))
    names = [name.removesuffix(".weight") for name in draft if draft[name].dtype == torch.uint8]
    assert len(names) == 5 * 30
    for name in names:
        data, scales, offsets = (
            draft[f"{name}.{ending}"] for ending in ("weight", "weights_scaling_factor", "weights_offset")
        )
        numbers, weight = from_int4(data, scales, offsets, torch.float32), target[f"{name}.weight"].float()
        assert ((numbers - weight).abs() <= weight.abs() * 2.0**-8 + weight.abs().max() * 2.0**-10).all(), name


def test_greedy_output_is_that_of_plain_decoding_and_most_drafts_stay(engine: Path) -> None:
    llm = LLM(engine, num_draft_tokens=4, kv_cache_tokens=4096)
    assert isinstance(llm.runner, TorchRunner)
    if not isinstance(llm.runner.model, NativeModel):
        pytest.skip("bfloat16 is exact on the native kernels only, and they were not built here")
    prompt = llm.tokenizer.encode_plain("\n\n".join(topics[name].strip() for name in sorted(topics)))[20_000:21_500]
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    drafted = llm.generate([prompt], params)
    (plain,) = llm.generate([prompt], params.model_copy(update={"num_draft_tokens": 0}))
    assert drafted[0].outputs[0].token_ids == plain.outputs[0].token_ids
    assert accepted(drafted) > 0.6 * drafted[0].metrics.num_draft_tokens
