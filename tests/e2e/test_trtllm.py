"""Whole runs on TensorRT-LLM engines (the stand-in's), token for token what TorchRunner gives."""

import json
import pydoc_data.topics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from magicdec.builder.build import build_pair
from magicdec.builder.config import load_config
from magicdec.errors import EngineError, RequestError
from magicdec.pair.config import PairConfig
from magicdec.pair.manifest import load_pair
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.sampler import Span, verify_all
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.runners import torch_runner
from magicdec.runtime.runners.interface import ModelRunner
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.runners.trtllm.runner import TrtllmRunner
from magicdec.runtime.sampling.acceptance import VerifyOutput
from magicdec.runtime.sampling.draft import Draft
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.test_exactness import PARAMS, PROMPTS, accepted
from tests.support.engines import BLOCK, DRAFTERS, Drafter, tiny_pair
from tests.support.paths import ROOT
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import FAMILIES, Family
from tests.support.trtllm import compile_pair, standin

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


def assert_alike(outputs: list[RequestOutput], reference: list[RequestOutput], error: float = 1e-4) -> None:
    """The same tokens, and drafts of the same worth: a wrong draft cache would cost acceptance and nothing else.

    error: what log-probabilities may differ by.
    """
    for out, ref in zip(outputs, reference, strict=True):
        mine, wanted = out.outputs[0], ref.outputs[0]
        assert (mine.token_ids, mine.text) == (wanted.token_ids, wanted.text)
        assert (mine.finish_reason, mine.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        for row, ref_row in zip(mine.logprobs or [], wanted.logprobs or [], strict=True):
            assert list(row) == list(ref_row)
            assert [p.logprob for p in row.values()] == pytest.approx([p.logprob for p in ref_row.values()], abs=error)
        for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_preemptions", "num_cached_tokens"):
            assert getattr(out.metrics, name) == getattr(ref.metrics, name), name


@pytest.fixture
def accepted_counts(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """(draft tokens, accepted ones) of every verification, as they come."""
    seen: set[tuple[int, int]] = set()

    def recorded(
        requests: Sequence[Request], logits: torch.Tensor, spans: Sequence[Span], drafts: Sequence[Draft]
    ) -> list[VerifyOutput | RequestError]:
        verdicts = verify_all(requests, logits, spans, drafts)
        pairs = zip(drafts, verdicts, strict=True)
        seen.update((len(draft.token_ids), out.num_accepted) for draft, out in pairs if isinstance(out, VerifyOutput))
        return verdicts

    monkeypatch.setattr("magicdec.runtime.engine.engine.verify_all", recorded)
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


PRECISIONS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "fp8 weights": {"quantization": {"target": "fp8", "draft": "fp8"}},
    "fp8 weights and caches": {"quantization": {"target": "fp8", "draft": "fp8"}, "kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, fp8 weights and caches": {
        "dtype": "bfloat16",
        "quantization": {"target": "fp8", "draft": "fp8"},
        "kv_cache_dtype": "fp8",
    },
}


def build_in(precision: str, source: Path, output: Path) -> tuple[Path, Path]:
    """(for PyTorch, compiled from it) from the checkpoints of a tiny pair."""
    config, changes = load_pair(source).config, dict(PRECISIONS[precision])
    if "kv_cache_dtype" in changes:
        changes["draft"] = config.draft.model_dump() | {"kv_cache_dtype": changes["kv_cache_dtype"]}
    config = PairConfig.model_validate(config.model_dump() | changes)
    built = build_pair(source.parent / "target", source.parent / "draft", config, output / "torch")
    return built, compile_pair(built, output / "compiled")


@pytest.fixture
def pytorch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in computes with PyTorch's kernels; the native ones round less often."""
    monkeypatch.setattr(torch_runner, "native", lambda: None)


@pytest.mark.usefixtures("pytorch_path")
@pytest.mark.parametrize("precision", ["float16", "fp8 weights", "fp8 weights and caches"])
def test_precisions(pairs: Pairs, precision: str, tmp_path: Path) -> None:
    """Sinks are rotated anew in the cache's own type, FP8 by its scale; acceptance would tell."""
    source, compiled = build_in(precision, pairs("in_cache", "llama")[0], tmp_path)
    outputs = LLM(compiled, device="cpu").generate(PROMPTS, PARAMS)
    assert_alike(outputs, LLM(source).generate(PROMPTS, PARAMS), error=0.02 if precision == "float16" else 1e-3)
    assert accepted(outputs) > 50


@pytest.mark.usefixtures("pytorch_path")
@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16, fp8 weights and caches"])
def test_bfloat16_differs_only_where_rounding_decides(pairs: Pairs, precision: str, tmp_path: Path) -> None:
    """Its sums depend on the rows that share a product, so that close decisions may differ; how close is measured.

    Against the same weights in float32, the engine may err at most twice as much as PyTorch in bfloat16.
    """
    source, compiled = build_in(precision, pairs("in_cache", "llama")[0], tmp_path)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    outputs, reference = LLM(compiled, device="cpu").generate(PROMPTS, params), LLM(source).generate(PROMPTS, params)
    exact = TorchRunner(source / "target", 16, BLOCK, torch.float32)
    runners: list[ModelRunner] = [
        TrtllmRunner(compiled / "target", 16, BLOCK, "cpu"),
        TorchRunner(source / "target", 16, BLOCK),
    ]
    worst, mean, partings = [0.0, 0.0], [0.0, 0.0], []
    for out, ref in zip(outputs, reference, strict=True):
        tokens = ref.prompt_token_ids + ref.outputs[0].token_ids
        wanted = rows_of(exact, tokens)
        for index, runner in enumerate(runners):
            error = (rows_of(runner, tokens) - wanted).abs()
            worst[index] = max(worst[index], float(error.max()))
            mean[index] += float(error.mean())
        partings.append(parting(out, ref))
    assert worst[0] <= 2 * worst[1]
    assert mean[0] <= 1.2 * mean[1]
    assert sum(at for at, _ in partings) > 60, "tokens agree until rounding decides"
    assert max(margin for _, margin in partings) <= 2 * worst[1]
    assert accepted(outputs) > 50


def rows_of(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits of every row, up to nine at a time as in verification."""
    logits = []
    table = list(range(-(-len(tokens) // BLOCK)))
    for first in range(0, len(tokens), 9):
        stop = min(first + 9, len(tokens))
        row = SequenceInput(tokens[first:stop], range(first, stop), first, table, range(first, stop), stop - first)
        logits.append(runner.forward(pack([row])).clone())
    return torch.cat(logits)


def parting(output: RequestOutput, reference: RequestOutput) -> tuple[int, float]:
    """(tokens that agree, the reference's margin where they part; 0 if they do not)."""
    mine, wanted = output.outputs[0], reference.outputs[0]
    pairs = zip(mine.token_ids, wanted.token_ids, strict=True)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return len(wanted.token_ids), 0.0
    assert wanted.logprobs is not None
    best, second = sorted((entry.logprob for entry in wanted.logprobs[at].values()), reverse=True)[:2]
    return at, best - second


def test_a_pair_that_build_engine_compiled(pairs: Pairs, tmp_path: Path) -> None:
    """The whole way: checkpoints, both engines, manifests, generation."""
    source, _ = pairs("in_cache", "llama")
    config = load_pair(source).config.model_copy(update={"backend": "trtllm"})
    built = build_pair(source.parent / "target", source.parent / "draft", config, tmp_path / "pair", workers=0)
    outputs = LLM(built, device="cpu").generate(PROMPTS[:3], PARAMS[:3])
    assert_alike(outputs, LLM(source).generate(PROMPTS[:3], PARAMS[:3]))


@pytest.mark.parametrize("draft_ranks", [2, 1])
def test_two_ranks(pairs: Pairs, draft_ranks: int, tmp_path: Path) -> None:
    """Real MPI ranks: rank 0 schedules, both execute their engines; the draft on one rank or on both."""
    source, _ = pairs("in_cache", "llama")
    config = load_pair(source).config
    draft = config.draft.model_dump() | {"tp_size": draft_ranks}
    config = PairConfig.model_validate(config.model_dump() | {"tp_size": 2, "draft": draft})
    built = build_pair(source.parent / "target", source.parent / "draft", config, tmp_path / "torch")
    compiled, found = compile_pair(built, tmp_path / "compiled"), tmp_path / "tokens.json"
    command = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "tests.e2e.trtllm_ranks"]
    options = json.dumps({"num_draft_tokens": 4})
    run = subprocess.run(
        [*command, str(compiled), str(found), options], cwd=ROOT, timeout=120, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result, reference = json.loads(found.read_text()), LLM(source).generate(PROMPTS, PARAMS)
    assert result["tokens"] == [out.outputs[0].token_ids for out in reference]
    assert (result["ranks"], result["accepted"]) == (2, accepted(reference))


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("kind", ["self", "model"])
def test_smollm2(kind: Literal["self", "model"], tmp_path: Path) -> None:
    """The real model on real text, long enough for the window of 256 to move, in float32."""
    config = load_config("smollm2-135m-self")
    draft = config.draft.model_copy(update={"window_size": 256, "sink_positions": None})
    config = config.model_copy(update={"draft": draft})
    drafter: Path | Literal["self"] = "self" if kind == "self" else smollm2_gguf()
    source = build_pair(smollm2_gguf(), drafter, config, tmp_path / "torch", dtype="float32")
    compiled = compile_pair(source, tmp_path / "compiled")
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    llm = LLM(compiled, device="cpu", num_draft_tokens=4, kv_cache_tokens=4096)
    tokens = llm.tokenizer.encode(text[:20_000])
    prompts = [tokens[100:700], tokens[2000:2200], tokens[:40]]
    params = [
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
        SamplingParams(seed=12, max_tokens=32, temperature=0.7, top_p=0.9, ignore_eos=True),
        SamplingParams(seed=13, max_tokens=32, top_k=50, repetition_penalty=1.1, ignore_eos=True),
    ]
    outputs = llm.generate(prompts, params)
    assert_alike(outputs, LLM(source, num_draft_tokens=4, kv_cache_tokens=4096).generate(prompts, params))
    assert accepted(outputs) > 40
