"""Whole runs on TensorRT-LLM engines (the stand-in's), token for token what TorchRunner gives."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.runtime.draft import Draft
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.rejection import VerifyOutput
from magicdec.runtime.request import Request
from magicdec.runtime.sampler import verify
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.trtllm_runner import TrtllmRunner
from tests.e2e.test_exactness import PARAMS, PROMPTS, accepted
from tests.engines import DRAFTERS, Drafter, tiny_pair
from tests.tiny_models import FAMILIES, Family
from tests.trtllm import compile_pair, standin

Pairs = Callable[[Drafter, Family], tuple[Path, Path]]


@pytest.fixture(autouse=True, scope="module")
def _standin() -> Iterator[None]:
    with standin():
        yield


@pytest.fixture(scope="module")
def pairs(_standin: None, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """(for PyTorch, compiled from it) of a drafter and a family of models, built once."""
    directory = tmp_path_factory.mktemp("trtllm")

    def make(drafter: Drafter, family: Family = "llama") -> tuple[Path, Path]:
        source = tiny_pair(directory / family, drafter, family=family)
        compiled = directory / family / f"{drafter}-compiled"
        return source, compiled if compiled.exists() else compile_pair(source, compiled)

    return make


def assert_alike(outputs: list[RequestOutput], reference: list[RequestOutput]) -> None:
    """The same tokens, and drafts of the same worth: a wrong draft cache would cost acceptance and nothing else."""
    for out, ref in zip(outputs, reference, strict=True):
        mine, wanted = out.outputs[0], ref.outputs[0]
        assert (mine.token_ids, mine.text) == (wanted.token_ids, wanted.text)
        assert (mine.finish_reason, mine.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        for row, ref_row in zip(mine.logprobs or [], wanted.logprobs or [], strict=True):
            assert list(row) == list(ref_row)
            assert [p.logprob for p in row.values()] == pytest.approx([p.logprob for p in ref_row.values()], abs=1e-4)
        for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_cached_tokens"):
            assert getattr(out.metrics, name) == getattr(ref.metrics, name), name


@pytest.fixture
def accepted_counts(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """(draft tokens, accepted ones) of every verification, as they come."""
    seen: set[tuple[int, int]] = set()

    def recorded(request: Request, logits: torch.Tensor, draft: Draft) -> VerifyOutput:
        verdict = verify(request, logits, draft)
        seen.add((len(draft.token_ids), verdict.num_accepted))
        return verdict

    monkeypatch.setattr("magicdec.runtime.engine.verify", recorded)
    return seen


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_flight_batching_and_wrapping(
    pairs: Pairs, drafter: Drafter, length: int, accepted_counts: set[tuple[int, int]]
) -> None:
    """Six requests in a batch of four, greedy and seeded: chunks, verifications and generations share passes."""
    source, compiled = pairs(drafter, "llama")
    llm = LLM(compiled, num_draft_tokens=length, device="cpu")
    assert isinstance(llm.runner, TrtllmRunner)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    if drafter != "ngram" and length <= 3:
        assert {(length, count) for count in range(length + 1)} <= accepted_counts, "rejection at every place"
        assert accepted(outputs) > 50
    assert_alike(outputs, LLM(source, num_draft_tokens=length).generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption_and_small_chunks(pairs: Pairs, drafter: Drafter) -> None:
    source, compiled = pairs(drafter, "llama")
    options: dict[str, Any] = {"num_draft_tokens": 3, "kv_cache_tokens": 256, "max_num_tokens": 17}
    outputs = LLM(compiled, device="cpu", **options).generate(PROMPTS, PARAMS)
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    assert_alike(outputs, LLM(source, **options).generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("drafter", ["self", "in_cache"])
def test_the_rejection_rule(pairs: Pairs, drafter: Drafter) -> None:
    """Its samples depend on the drafts' own distributions as well."""
    source, compiled = pairs(drafter, "llama")
    params = [
        SamplingParams(seed=index, acceptance="rejection", temperature=0.8, max_tokens=60, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]
    outputs = LLM(compiled, device="cpu").generate(PROMPTS, params)
    assert_alike(outputs, LLM(source).generate(PROMPTS, params))


def test_the_type_of_an_engine_cannot_be_changed(pairs: Pairs) -> None:
    _, compiled = pairs("self", "llama")
    with pytest.raises(EngineError, match="computes in the type that it was built for"):
        LLM(compiled, device="cpu", dtype="float64")


def test_an_engine_runs_on_a_gpu_unless_told_otherwise(pairs: Pairs) -> None:
    assert not torch.cuda.is_available(), "this test is for machines without"
    with pytest.raises(EngineError, match="needs an NVIDIA GPU"):
        LLM(pairs("self", "llama")[1])


def test_larger_batches_than_the_engine_was_built_for(pairs: Pairs) -> None:
    """Passes are cut, so that a draft may read many prompts at once."""
    source, compiled = pairs("in_cache", "llama")
    options: dict[str, Any] = {"max_batch_size": 6, "max_num_tokens": 1000}
    outputs = LLM(compiled, device="cpu", **options).generate(PROMPTS, PARAMS)
    assert_alike(outputs, LLM(source, **options).generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_families(pairs: Pairs, family: Family) -> None:
    """Biases, norms of heads, scaled rotations, with a cyclic cache whose sinks move."""
    source, compiled = pairs("in_cache", family)
    outputs = LLM(compiled, device="cpu").generate(PROMPTS[:4], PARAMS[:4])
    assert_alike(outputs, LLM(source).generate(PROMPTS[:4], PARAMS[:4]))
    assert accepted(outputs) > 30
