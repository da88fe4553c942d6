"""Whole runs with an int8 or int4 copy of the target as its own draft: faster drafts, the same output."""

import functools
from pathlib import Path

import pytest
import torch

from magicdec.builder import calibrate
from magicdec.commands.inspect import inspect
from magicdec.pair.config import WeightOnly
from magicdec.pair.manifest import load_pair
from magicdec.pair.memory import plan_memory
from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack
from magicdec.plugins.model.native_model import NativeModel
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.test_distribution import p_value
from tests.e2e.test_exactness import PARAMS, PROMPTS, accepted, assert_same
from tests.support.engines import BLOCK, Drafter, tiny_pair

KINDS: tuple[WeightOnly, ...] = ("int8", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weight-only")


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has seen everything soon."""
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 512)


def engine(directory: Path, kind: WeightOnly | None, drafter: Drafter = "self", *, fp8: bool = False) -> Path:
    return tiny_pair(directory, drafter, weight_only=kind, fp8=fp8, intermediate_size=64)


@functools.cache
def plain(engine_dir: Path) -> list[RequestOutput]:
    """Each request alone, draft length 0, in one chunk."""
    llm = LLM(engine_dir, dtype="float64", num_draft_tokens=0, max_batch_size=1, max_num_tokens=1024)
    return [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("fp8", [False, True], ids=["float64", "fp8 target"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_plain_decoding(directory: Path, kind: WeightOnly, fp8: bool) -> None:
    """Greedy and seeded, and compared with a pair that has no such draft at all."""
    llm = LLM(engine(directory, kind, fp8=fp8), dtype="float64", num_draft_tokens=4, max_num_tokens=40)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert_same(outputs, plain(engine(directory, None, fp8=fp8)))
    assert 50 < accepted(outputs) < sum(out.metrics.num_draft_tokens for out in outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_give_plain_decodings_output_in_any_dtype(directory: Path, dtype: str) -> None:
    llm = LLM(engine(directory, "int4"), dtype=dtype, num_draft_tokens=4, max_num_tokens=40)
    assert isinstance(llm.runner, TorchRunner)
    if not isinstance(llm.runner.model, NativeModel):
        pytest.skip("the native library was not built here")
    outputs = llm.generate(PROMPTS, PARAMS)
    reference = LLM(engine(directory, None), dtype=dtype, num_draft_tokens=0).generate(PROMPTS, PARAMS)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in reference]
    assert accepted(outputs) > 50


def test_preemption_changes_nothing(directory: Path) -> None:
    llm = LLM(engine(directory, "int4"), dtype="float64", num_draft_tokens=8, kv_cache_tokens=256, max_num_tokens=40)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    assert_same(outputs, plain(engine(directory, None)))


def test_greedy_under_the_rejection_rule_is_plain_decoding(directory: Path) -> None:
    params = GREEDY.model_copy(update={"acceptance": "rejection", "logprobs": 0})
    llm = LLM(engine(directory, "int4"), dtype="float64", num_draft_tokens=4)
    speculative = llm.generate(PROMPTS, params)
    reference = llm.generate(PROMPTS, params.model_copy(update={"num_draft_tokens": 0}))
    assert_same(speculative, reference)
    assert accepted(speculative) > 50
    assert accepted(reference) == 0


def test_samples_follow_the_law_of_plain_decoding(directory: Path) -> None:
    """Chi-square against enumerated outputs, for the rejection rule."""
    pair = engine(directory, "int4")
    llm = LLM(pair, dtype="float64", max_batch_size=50, max_num_tokens=1000, max_seq_len=128)
    assert p_value(llm, "top-k") > 1e-3


def test_drafts_are_rejected_at_every_place(directory: Path) -> None:
    llm = LLM(engine(directory, "int4"), dtype="float64", num_draft_tokens=4)
    steps = set()
    for seed in range(6):
        before = 0
        for output in llm.generate_stream(PROMPTS[3], SamplingParams(seed=seed, max_tokens=60, ignore_eos=True)):
            count = len(output.outputs[0].token_ids)
            steps.add(count - before)
            before = count
    assert steps == {1, 2, 3, 4, 5}, "accepted drafts of a round, and one more token"


def test_a_separate_int4_draft_changes_nothing_either(directory: Path) -> None:
    llm = LLM(engine(directory, "int4", "in_cache"), dtype="float64", num_draft_tokens=4)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert_same(outputs, plain(engine(directory, None)))
    assert accepted(outputs) > 50


def largest_error(llm: LLM, engine_dir: Path) -> float:
    """How far the pool's entries of a request, near its end, are from those of a pass of the target alone."""
    assert isinstance(llm.runner, TorchRunner)
    fresh = TorchRunner(engine_dir / "target", num_blocks=16, block_size=BLOCK, dtype=torch.float64)
    llm.engine.add_request("r", PROMPTS[3], GREEDY)
    worst = 0.0
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        for request in llm.engine.scheduler.running:
            count = request.num_computed_tokens
            slots = llm.engine.blocks.slots(request.request_id, 0, count)
            tokens = request.token_ids[:count]
            fresh.forward(pack([SequenceInput(tokens, range(count), 0, range(16), range(count), num_logits=1)]))
            for pool, expected in (
                (llm.runner.cache.keys, fresh.cache.keys),
                (llm.runner.cache.values, fresh.cache.values),
            ):
                worst = max(worst, (pool[:, :, slots] - expected[:, :, :count]).abs().max().item())
    return worst


def test_verification_overwrites_what_drafts_wrote(directory: Path) -> None:
    """Every entry of a committed token is the target's own, to rounding."""
    pair = engine(directory, "int4")
    assert largest_error(LLM(pair, dtype="float64", num_draft_tokens=4), pair) < 1e-9


def test_entries_that_drafts_left_behind_are_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: verification puts back what the draft had written to the slots of its tokens."""
    llm = LLM(engine(directory, "int4"), dtype="float64", num_draft_tokens=4)
    target, proposer = llm.runner, llm.engine.drafting.proposer
    assert isinstance(target, TorchRunner)
    assert isinstance(proposer, ModelProposer)
    pool, written = target.cache, set()
    draft_forward, target_forward = proposer.runner.forward, target.forward

    def drafting(inputs: ModelInput) -> torch.Tensor:
        written.update(inputs.slot_mapping.tolist())
        return draft_forward(inputs)

    def verifying(inputs: ModelInput) -> torch.Tensor:
        slots = sorted(written)
        keys, values = pool.keys[:, :, slots].clone(), pool.values[:, :, slots].clone()
        logits = target_forward(inputs)
        pool.keys[:, :, slots], pool.values[:, :, slots] = keys, values
        written.clear()
        return logits

    monkeypatch.setattr(proposer.runner, "forward", drafting)
    monkeypatch.setattr(target, "forward", verifying)
    outputs = llm.generate(PROMPTS, PARAMS)
    expected = plain(engine(directory, None))
    differ = [out.outputs[0].token_ids != ref.outputs[0].token_ids for out, ref in zip(outputs, expected, strict=True)]
    assert any(differ), "the equality of outputs must see it"
    assert largest_error(llm, engine(directory, "int4")) > 1e-4, "and so must the comparison of entries"


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_a_second_set_of_weights_and_no_second_cache(directory: Path, kind: WeightOnly) -> None:
    pair = engine(directory, kind)
    llm = LLM(pair, kv_cache_tokens=256)
    target, draft = llm.runner, llm.draft_runner
    assert isinstance(target, TorchRunner)
    assert isinstance(draft, TorchRunner)
    assert draft.cache is target.cache
    memory = llm.memory()
    assert (memory["draft_kv_bytes"], memory["draft_kv_bytes_per_request"]) == (0, 0)
    size = (pair / "draft/rank0.safetensors").stat().st_size
    assert memory["draft_weight_bytes"] == size < (pair / "target/rank0.safetensors").stat().st_size / 2
    plan = plan_memory(pair, load_pair(pair).config, context=256, batch_size=1)
    assert (plan.draft_kv, plan.draft_weights, plan.target_kv) == (0, size, memory["target_kv_bytes"])


def test_inspect_shows_both_sets_of_weights(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(engine(directory, "int4"), context=256, batch=1, verify=True, as_json=False)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "the target's weights in int4 through a bounded window" in text
    assert "int4 weights (embedding and output matrix int8)" in text
    assert "KV cache the target's" in text
    assert "KV a token none" in text
    assert "draft KV 0 bytes (reads the target's blocks)" in text
