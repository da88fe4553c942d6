"""Where each output token comes from: a plain step, an accepted draft, or the token that ends a round."""

from collections import Counter
from collections.abc import Sequence

import pytest

from magicdec.plugins import acceptance
from magicdec.plugins.acceptance import AcceptanceRequest, Outcome
from magicdec.runtime.engine.device_acceptance import DeviceAcceptance
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.request import Request
from magicdec.runtime.outputs import RequestOutput, TokenOrigin
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.audit import Audit
from tests.support.one_request import gumbel

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
NUM_DRAFTS = 4


def _scripted(num_right: int, right: Sequence[int], *, on_device: bool) -> Engine:
    """An engine each of whose rounds proposes four tokens, the first num_right of them right ones."""
    engine = toy.engine("in_cache", num_draft_tokens=NUM_DRAFTS)

    def script(request: Request, drafts: Sequence[int]) -> int:
        token_id = right[request.num_output_tokens + len(drafts)]
        return token_id if len(drafts) < num_right else (token_id + 1) % toy.VOCAB_SIZE

    Audit(engine, window_size=8, num_sink_tokens=3, script=script)
    if on_device:
        engine.device_acceptance = DeviceAcceptance(_accept, "cpu")
    return engine


def _accept(logits: object, draft_probs: object, requests: Sequence[AcceptanceRequest]) -> list[Outcome | None]:
    return acceptance.accept(logits, draft_probs, requests, gumbel, block_size=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("end", range(1, 12))
@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_scripted_rounds_up_to_a_stop_token(num_right: int, end: int, on_device: bool) -> None:
    """The prompt's token is plain, each round is accepted drafts and its last token; an end inside a round cuts it."""
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    right = toy.plain(PROMPT, free).token_ids
    stop = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[right[end]])
    length = right.index(right[end]) + 1
    (output,) = toy.run(_scripted(num_right, right, on_device=on_device), [PROMPT], [stop])
    one_round = [*["accepted"] * num_right, "bonus" if num_right == NUM_DRAFTS else "recovered"]
    assert output.outputs[0].token_ids == right[:length]
    assert output.outputs[0].token_origins == (["plain"] + one_round * 12)[:length]


def test_without_drafts_every_token_is_plain() -> None:
    """Also where the engine could draft."""
    (output,) = toy.run(toy.engine("self"), [PROMPT], [SamplingParams(seed=1, max_tokens=9, num_draft_tokens=0)])
    assert set(output.outputs[0].token_origins) == {"plain"}
    assert len(output.outputs[0].token_origins) == len(output.outputs[0].token_ids)


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_counts_agree_with_the_metrics_under_preemption(kind: toy.Kind) -> None:
    """Two outputs each, sampled, in a pool that forces recomputation; what was told once never changes."""
    prompts = [PROMPT, PROMPT[::-1] * 2, PROMPT[4:], PROMPT * 2]
    params = [SamplingParams(seed=seed, n=2, max_tokens=30, ignore_eos=True) for seed in range(4)]
    engine = toy.engine(kind, num_blocks=28)
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, param)
    newest: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            _check_growth(newest.get(output.request_id), output)
            newest[output.request_id] = output
    outputs = list(newest.values())
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all(output.outputs[0].token_origins != output.outputs[1].token_origins for output in outputs)
    for output in outputs:
        counts = Counter(origin for completion in output.outputs for origin in completion.token_origins)
        assert sum(counts.values()) == output.metrics.num_output_tokens == 60
        assert counts["recovered"] + counts["bonus"] == output.metrics.num_rounds > 0
        assert counts["accepted"] == output.metrics.num_accepted_tokens > 0


def _check_growth(before: RequestOutput | None, now: RequestOutput) -> None:
    """Each step appends nothing, one plain token, or accepted ones and the token that ends the round."""
    for index, completion in enumerate(now.outputs):
        old: list[TokenOrigin] = before.outputs[index].token_origins if before else []
        assert completion.token_origins[: len(old)] == old
        assert len(completion.token_origins) == len(completion.token_lengths) == len(completion.token_ids)
        new = completion.token_origins[len(old) :]
        assert set(new[:-1]) <= {"accepted"}
        assert new[-1:] != ["accepted"]
        assert new[-1:] != ["plain"] or len(new) == 1
