"""The batched path of acceptance gives what the path request by request gives, and leaves to it what it cannot do."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from magicdec.plugins import acceptance
from magicdec.plugins.acceptance import AcceptanceRequest, Outcome
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.engine.device_acceptance import DeviceAcceptance, kernel_acceptance, supported
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.one_request import gumbel
from tests.support.toy_runner import ToyRunner

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 3], [9, 1, 4], [2]]
PARAMS = [
    SamplingParams(max_tokens=20, seed=3),
    SamplingParams(max_tokens=20, temperature=0, logprobs=2),
    SamplingParams(max_tokens=20, temperature=0.7, acceptance="rejection", seed=5, n=2),
    SamplingParams(max_tokens=20, temperature=1.3, top_p=0.8, seed=7),
    SamplingParams(max_tokens=20, acceptance="rejection", seed=8, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.4),
]


class Spy:
    """The reference of the kernel, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[AcceptanceRequest] = []

    def accept(
        self, logits: torch.Tensor, draft_probs: torch.Tensor, requests: Sequence[AcceptanceRequest]
    ) -> list[Outcome | None]:
        self.requests += requests
        return acceptance.accept(logits, draft_probs, requests, gumbel, block_size=16)


@pytest.mark.parametrize("kind", toy.KINDS)
def test_engine_gives_the_same_outputs(kind: toy.Kind) -> None:
    wanted = [output.outputs for output in toy.run(toy.engine(kind), PROMPTS, PARAMS)]
    fused, spy = toy.engine(kind), Spy()
    fused.device_acceptance = DeviceAcceptance(spy.accept, "cpu")
    assert [output.outputs for output in toy.run(fused, PROMPTS, PARAMS)] == wanted
    assert {request.temperature for request in spy.requests} == {1.0, 0.7}


class Broken(ToyRunner):
    """NaN after token 5."""

    def next_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits = super().next_logits(token_ids)
        return torch.full_like(logits, torch.nan) if token_ids[-1] == 5 else logits


@pytest.mark.parametrize("kind", ["plain", "ngram", "in_cache"])
def test_unreadable_logits_end_a_request_at_the_same_token(kind: toy.Kind) -> None:
    wanted = [output.outputs for output in toy.run(toy.engine(kind, target_type=Broken), PROMPTS, PARAMS)]
    assert any(output.error for outputs in wanted for output in outputs)
    fused = toy.engine(kind, target_type=Broken)
    fused.device_acceptance = DeviceAcceptance(Spy().accept, "cpu")
    assert [output.outputs for output in toy.run(fused, PROMPTS, PARAMS)] == wanted


class Narrow(ToyRunner):
    """Logits in float32, as real runners give them."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        return super().forward(inputs).float()


def test_float32_logits() -> None:
    """Two roundings of the same law: tokens differ only where a draw falls between them, with 16 tokens hardly ever."""
    wanted = toy.run(toy.engine("self", target_type=Narrow), PROMPTS, PARAMS)
    fused = toy.engine("self", target_type=Narrow)
    fused.device_acceptance = DeviceAcceptance(Spy().accept, "cpu")
    got = toy.run(fused, PROMPTS, PARAMS)
    assert [[o.token_ids for o in out.outputs] for out in got] == [[o.token_ids for o in out.outputs] for out in wanted]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.3, "seed": 1, "stop_token_ids": [3], "logprobs": 1, "n": 2, "top_k": -1}, True),
        ({"top_k": 3}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 0.9}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"bad_words": ["a"]}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_supported(params: dict[str, object], expected: bool) -> None:
    assert supported(SamplingParams(**params)) is expected  # type: ignore[arg-type]


def test_logits_on_the_host_are_left_alone() -> None:
    fused, spy = toy.engine("self"), Spy()
    fused.device_acceptance = DeviceAcceptance(spy.accept)
    toy.run(fused, PROMPTS, PARAMS)
    assert not spy.requests


def test_only_cuda_gets_the_kernel() -> None:
    assert kernel_acceptance("cpu") is None
    assert kernel_acceptance("cuda:0") is not None


def test_the_package_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import magicdec.runtime.llm, magicdec.plugins.acceptance;"
        "from magicdec.runtime.engine.device_acceptance import kernel_acceptance;"
        "assert kernel_acceptance('cuda') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
