"""The Triton kernels in Triton's interpreter, which has to be chosen before triton is imported.

So these tests run in a process of their own: see test_acceptance_kernel.py.
"""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from magicdec.plugins import acceptance, acceptance_kernel, acceptance_ops
from magicdec.plugins.acceptance import AcceptanceRequest, Outcome, Rule
from magicdec.runtime.engine.device_acceptance import DeviceAcceptance
from magicdec.runtime.sampling_params import SamplingParams
from tests.plugins.acceptance_cases import Batch, at_the_edges, random_batch
from tests.support import toy
from tests.support.one_request import gumbel


def reference(batch: Batch, block_size: int) -> list[Outcome | None]:
    return acceptance.accept(batch.logits, batch.draft_probs, batch.requests, gumbel, block_size)


def kernel(batch: Batch, block_size: int, module: ModuleType = acceptance_kernel) -> list[Outcome | None]:
    outcomes: list[Outcome | None] = module.accept(batch.logits, batch.draft_probs, batch.requests, block_size)
    return outcomes


SHAPES = {
    "one block": (16, 16, torch.float32, 100),
    "one block, not full": (23, 32, torch.float64, 40),
    "three blocks": (40, 16, torch.bfloat16, 30),
    "three larger blocks": (130, 64, torch.float16, 20),
    "real blocks": (2500, 1024, torch.float32, 8),
    "one token": (1, 16, torch.float32, 5),
}


def check(seed: int, vocab_size: int, block_size: int, dtype: torch.dtype, count: int) -> None:
    rng = np.random.default_rng(seed)
    batch = at_the_edges(rng, random_batch(rng, count, vocab_size, dtype))
    assert kernel(batch, block_size) == reference(batch, block_size)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_same_draws_same_tokens(shape: tuple[int, int, torch.dtype, int]) -> None:
    check(1, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 17))
def test_same_draws_same_tokens_thousands_of_times(seed: int) -> None:
    for shape in SHAPES.values():
        check(seed, *shape)


def test_rows_with_a_stride_and_no_requests() -> None:
    batch = random_batch(np.random.default_rng(0), 10, 40)
    wide = torch.nn.functional.pad(batch.logits, (0, 24), value=99.0)[:, :40]
    assert kernel(replace(batch, logits=wide), 16) == reference(batch, 16)
    assert kernel(Batch(torch.empty(0, 40), torch.empty(0, 40), []), 16) == []


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unreadable_rows(rule: Rule, bad: float) -> None:
    """The first request comes to the bad row and is refused; the second ends before it."""
    logits = torch.full((2, 20), -50.0)
    logits[0, 17] = 50
    logits[1] = bad if bad < 0 else logits[1].index_fill(0, torch.tensor([18]), bad)
    probs = torch.nn.functional.one_hot(torch.tensor([17, 3]), 20).float()
    requests = [AcceptanceRequest(rule, [draft], 1.0, [0.5], [0.5, 0.5]) for draft in (17, 3)]
    batch = Batch(logits.repeat(2, 1), probs, requests)
    assert kernel(batch, 16) == reference(batch, 16) == [None, Outcome(0, 17)]


def test_nothing_over_the_draft_falls_back_to_the_target() -> None:
    request = AcceptanceRequest(Rule.REJECTION, [0], 1.0, [0.99], [0.75, 0.5])
    assert kernel(Batch(torch.zeros(2, 2), torch.tensor([[0.6, 0.6]]), [request]), 16) == [Outcome(0, 1)]


def test_noise_is_that_of_the_host() -> None:
    """Flat logits, so that the noise alone decides, up to its last bits."""
    rng = np.random.default_rng(0)
    requests = [AcceptanceRequest(Rule.COUPLED, [], seed=int(s)) for s in rng.integers(2**64, size=20, dtype=np.uint64)]
    batch = Batch(torch.zeros(20, 100), torch.empty(0, 100), requests)
    wanted = [Outcome(0, int(gumbel(request.seed, 0, 100).argmax())) for request in requests]
    assert kernel(batch, 64) == wanted


FAULTS = {
    "draft rows of the neighbour": ("row - request, draft_stride, token", "row, draft_stride, token"),
    "excess of the neighbour": ("row - request, draft_stride, ids, ids < vocab", "row, draft_stride, ids, ids < vocab"),
    "ratio the wrong way round": ("* total.to(tl.float64) < weight", "* total.to(tl.float64) > weight"),
    "draw of another purpose": ("floats + row * _FLOATS + _SAMPLE_DRAW", "floats + row * _FLOATS + _ACCEPT_DRAW"),
    "search includes the edge": ("(tl.cumsum(shares) <= target)", "(tl.cumsum(shares) < target)"),
    "rest at the row's scale": ("rest << distance(top, block_top)", "rest"),
    "blocks at their own scale": ("other=0) >> distance(top, block_tops)", "other=0)"),
    "highest id of equals": (
        "tl.min(tl.where(scores == highest, ids, _NO_TOKEN))",
        "tl.max(tl.where(scores == highest, ids, -1))",
    ),
    "noise of the next position": ("ints + row * _INTS + _POSITION)", "ints + row * _INTS + _POSITION) + 1"),
}


@pytest.mark.parametrize(("snippet", "replacement"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_fault_is_found(tmp_path: Path, snippet: str, replacement: str) -> None:
    source = Path(acceptance_kernel.__file__).read_text()
    assert source.count(snippet) == 1, "the source has changed: plant the fault anew"
    file = tmp_path / "faulty_kernel.py"
    file.write_text(source.replace(snippet, replacement))
    spec = importlib.util.spec_from_file_location("faulty_kernel", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batches = [random_batch(np.random.default_rng(5), 12, 40), equal_and_steep_rows()]
    behind = torch.zeros(12, 40)  # so that a fault reads no memory of others
    drafts = [torch.cat([batch.draft_probs, behind])[: len(batch.draft_probs)] for batch in batches]
    batches = [replace(batch, draft_probs=rows) for batch, rows in zip(batches, drafts, strict=True)]
    assert any(kernel(batch, 16, module) != reference(batch, 16) for batch in batches)


def equal_and_steep_rows() -> Batch:
    """Ties, a first token without weight under a draw of 0, and draws that land in blocks of little weight."""
    logits = torch.linspace(0, -6, 40).repeat(8, 1)
    logits[0] = 0
    logits[1, 0] = -math.inf
    draws = [0.5, 0.0, *torch.linspace(0.9, 0.9995, 6).tolist()]
    requests = [AcceptanceRequest(Rule.REJECTION, [], sample_draws=[draw]) for draw in draws]
    return Batch(logits, torch.empty(0, 40), [AcceptanceRequest(Rule.GREEDY, []), *requests[1:]])


REQUESTS = [
    SamplingParams(max_tokens=12, seed=3),
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=12, temperature=0.7, acceptance="rejection", seed=5),
    SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, seed=7),
]


@pytest.mark.parametrize("kind", ["plain", "self"])
def test_engine_gives_the_same_tokens(kind: toy.Kind) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 3]]
    engine = toy.engine(kind)
    wanted = [output.outputs[0] for output in toy.run(engine, prompts, REQUESTS)]
    fused = toy.engine(kind)
    fused.device_acceptance = DeviceAcceptance(acceptance_kernel.accept, "cpu")
    got = [output.outputs[0] for output in toy.run(fused, prompts, REQUESTS)]
    assert [(o.token_ids, o.finish_reason, o.error) for o in got] == [
        (o.token_ids, o.finish_reason, o.error) for o in wanted
    ]


def test_the_interpreter_is_really_used() -> None:
    assert "Interpreted" in type(acceptance_ops.exp2).__name__
