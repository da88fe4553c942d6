"""How requests end on ToyRunner: inside an accepted run, by abort, by an error of target or draft; alone each time."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.request import Request
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.audit import Audit, published
from tests.support.toy_runner import ToyRunner

Rule = Literal["rejection", "coupled"]
RULES: tuple[Rule, ...] = ("rejection", "coupled")
MODELS: tuple[toy.Kind, ...] = ("self", "in_cache", "absolute")  # drafters whose drafts can be scripted
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
FREE: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}  # goes on past every other end


def _scripted(kind: toy.Kind, free_running: Sequence[int], **options: Any) -> Engine:
    """An engine whose drafts are all right, also past the end of the output, so that they are all accepted."""
    engine = toy.engine(kind, num_draft_tokens=4, **options)

    def script(request: Request, drafts: Sequence[int]) -> int:
        return free_running[request.num_output_tokens + len(drafts)]

    Audit(engine, window_size=8, num_sink_tokens=3, script=script)
    return engine


def _ending_at(end: str, position: int, output: Sequence[int]) -> dict[str, Any]:
    """Parameters that end this output with its token number `position` (from 0), or earlier."""
    if end == "max_tokens":
        return {"max_tokens": position + 1}
    if end == "stop_token":
        return {"stop_token_ids": [output[position]]}
    if end == "stop_string":
        return {"stop": [toy.ToyTokenizer().decode(output[position - 1 : position + 1])]}
    return {"ignore_eos": False, "logit_bias": {toy.EOS: 100.0}, "min_tokens": position}


@pytest.mark.parametrize("position", range(2, 12))
@pytest.mark.parametrize("end", ["eos", "stop_token", "stop_string", "max_tokens"])
@pytest.mark.parametrize("kind", MODELS)
def test_end_inside_an_accepted_run(kind: toy.Kind, end: str, position: int) -> None:
    """Tokens, text, log-probabilities, computed length and published blocks all end at the same token."""
    options: dict[str, Any] = {"seed": 5, "logprobs": 2, **FREE}
    free_running = toy.plain(PROMPT, SamplingParams(**options)).token_ids
    param = SamplingParams(**{**options, **_ending_at(end, position, free_running)})
    expected = toy.plain(PROMPT, param)
    if end == "eos":  # it is drafted, and so are tokens behind it
        free_running = expected.token_ids + free_running
    engine = _scripted(kind, free_running)
    engine.add_request("0", PROMPT, param)
    (request,) = engine.scheduler.waiting
    output = toy.drain(engine)["0"].outputs[0]
    toy.assert_equal(output, expected)
    assert len(output.token_ids) <= position + 1
    assert request.num_computed_tokens == len(request.token_ids) - 1 == len(PROMPT) + len(output.token_ids) - 1
    assert len(published(engine.blocks)) == request.num_computed_tokens // 4


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_behind_an_end_were_accepted_and_are_dropped(kind: toy.Kind) -> None:
    """The case above is no empty one: with four right drafts the stop token is the third of five accepted tokens."""
    options: dict[str, Any] = {"temperature": 0, **FREE}
    free_running = toy.plain(PROMPT, SamplingParams(**options)).token_ids
    assert free_running[3] not in free_running[:3]
    engine = _scripted(kind, free_running)
    (output,) = toy.run(engine, [PROMPT], [SamplingParams(**options, stop_token_ids=[free_running[3]])])
    assert output.outputs[0].token_ids == free_running[:4]
    assert (output.metrics.num_rounds, output.metrics.num_accepted_tokens) == (1, 4)


@pytest.mark.parametrize("kind", toy.KINDS)
def test_max_seq_len_ends_the_output(kind: toy.Kind) -> None:
    """At whatever distance from the prompt's end, also when only one token is left."""
    for max_seq_len in range(len(PROMPT) + 1, len(PROMPT) + 9):
        param = SamplingParams(seed=1, max_tokens=100, ignore_eos=True)
        engine = toy.engine(kind, max_seq_len=max_seq_len, num_blocks=-(-max_seq_len // 4))
        (output,) = toy.run(engine, [PROMPT], [param])
        toy.assert_equal(output.outputs[0], toy.plain(PROMPT, param, max_seq_len=max_seq_len))
        assert len(output.outputs[0].token_ids) == max_seq_len - len(PROMPT)


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", toy.KINDS)
def test_abort_at_any_time(kind: toy.Kind, n: int, after: int) -> None:
    """Before admission, in chunked prefill, while decoding: what there is comes back, neighbours never notice."""
    prompts = [PROMPT, PROMPT[::-1] * 2, PROMPT[3:]]
    params = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, n=n if i == 1 else 1) for i in range(3)]
    engine = toy.engine(kind, max_batch_size=2, max_num_tokens=10)
    for index in range(3):
        engine.add_request(str(index), prompts[index], params[index])
    finished: dict[str, RequestOutput] = {}
    for _ in range(after):
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    aborted = engine.abort("1")
    toy.check_integrity(engine)
    assert engine.abort("1") is None
    assert (aborted is None) == ("1" in finished)
    if aborted is not None:
        assert aborted.finished
        for index, output in enumerate(aborted.outputs):
            expected = toy.plain(prompts[1], params[1], index=index)
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            assert output.finish_reason == ("abort" if len(output.token_ids) < 12 else "length")
            assert output.text == toy.ToyTokenizer().decode(output.token_ids)
    finished |= toy.drain(engine)
    for index in (0, 2):
        toy.assert_equal(finished[str(index)].outputs[0], toy.plain(prompts[index], params[index]))
    engine.add_request("1", PROMPT, params[0])  # the name is free again
    toy.assert_equal(toy.drain(engine)["1"].outputs[0], toy.plain(PROMPT, params[0]))


class BadRunner(ToyRunner):
    """Has no law (NaN) after `bad` tokens of a sequence that begins with token 13; counts how often that happened."""

    bad = 20
    num_failures = 0
    broken = True

    def next_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As the language says, or NaN."""
        if self.broken and token_ids[0] == 13 and len(token_ids) >= self.bad:
            type(self).num_failures += 1
            return torch.full((self.vocab_size,), torch.nan, dtype=torch.float64)
        return super().next_logits(token_ids)


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("kind", toy.KINDS)
def test_request_without_a_law_ends_alone(kind: toy.Kind, acceptance: Rule) -> None:
    """An error with what came before it; neighbours and later requests are unharmed, nothing stays held."""
    prompts = [PROMPT, [13, *PROMPT], PROMPT[2:], [13] * 3]
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, acceptance=acceptance)] * 4
    engine = toy.engine(kind, target_type=BadRunner)
    outputs = toy.run(engine, prompts, params)
    for index in (0, 2):
        toy.assert_equal(outputs[index].outputs[0], toy.plain(prompts[index], params[index]))
    for index in (1, 3):
        output = outputs[index].outputs[0]
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "nan" in output.error
        length = BadRunner.bad - len(prompts[index])
        assert output.token_ids == toy.plain(prompts[index], params[index]).token_ids[:length]
        assert output.text == toy.ToyTokenizer().decode(output.token_ids)
    (again,) = toy.run(engine, [PROMPT], params[:1])
    toy.assert_equal(again.outputs[0], toy.plain(PROMPT, params[0]))


@pytest.mark.parametrize("kind", MODELS)
def test_drafts_may_lead_where_there_is_no_law(kind: toy.Kind) -> None:
    """The output ends before the row that is NaN, so plain decoding never sees it."""
    prompt = [13, *PROMPT]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    free_running = toy.plain(prompt, SamplingParams(**options)).token_ids
    param = SamplingParams(**options, stop_token_ids=[free_running[3]])
    engine = _scripted(kind, free_running, target_type=BadRunner)  # 16 tokens of 20, and then rounds of five
    (output,) = toy.run(engine, [prompt], [param])
    assert BadRunner.bad == len(prompt) + 4
    toy.assert_equal(output.outputs[0], toy.plain(prompt, param))


def test_what_a_failed_step_computed_is_not_shared() -> None:
    """Its keys and values may be what failed, so the next request with that prompt computes them itself."""
    prompt, param = [13] * 24, SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
    engine = toy.engine("plain", target_type=BadRunner)
    (failed,) = toy.run(engine, [prompt], [param])
    assert failed.outputs[0].finish_reason == "error"
    assert not published(engine.blocks)
    assert isinstance(engine.runner, BadRunner)
    engine.runner.broken = False
    (output,) = toy.run(engine, [prompt], [param])
    assert output.metrics.num_cached_tokens == 0
    toy.assert_equal(output.outputs[0], toy.plain(prompt, param))


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("bad", [1, 7, 11])
@pytest.mark.parametrize("kind", ["in_cache", "absolute"])
def test_broken_draft_changes_no_output(
    kind: toy.Kind, bad: int, acceptance: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN drafts from the start, later, or in the middle of a round: one warning, and plain decoding from then on."""

    class BadDraft(BadRunner):
        num_failures = 0

    BadDraft.bad = bad
    prompts = [[13, 2, 13], PROMPT, [13, *PROMPT], [13, *PROMPT, *PROMPT]]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, acceptance=acceptance, logprobs=1)] * 4
    engine = toy.engine(kind, draft_type=BadDraft, num_blocks=30)
    with caplog.at_level(logging.WARNING):
        outputs = toy.run(engine, prompts, params)
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        toy.assert_equal(output.outputs[0], toy.plain(prompt, param))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    warned = sorted(record.getMessage().split()[1] for record in caplog.records)
    assert warned == ["0#0", "2#0", "3#0"]
    assert BadDraft.num_failures == 3
    assert outputs[1].metrics.num_accepted_tokens > 0
    if bad == 7:  # the shortest prompt has room for a round before its draft fails, and for a part of the next
        assert outputs[0].metrics.num_draft_tokens > 0


def test_self_draft_that_fails_on_its_own_view_changes_no_output(caplog: pytest.LogCaptureFixture) -> None:
    """NaN wherever the view is not the true text: behind wrong drafts, and once the window hides a part of it."""
    prompt, param = [13, *PROMPT], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = toy.plain(prompt, param)
    truth = prompt + expected.token_ids

    class Strict(ToyRunner):
        def next_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
            law = super().next_logits(token_ids)
            return law if list(token_ids) == truth[: len(token_ids)] else torch.full_like(law, torch.nan)

    (output,) = toy.run(toy.engine("self", target_type=Strict, window_size=20), [prompt], [param])
    toy.assert_equal(output.outputs[0], expected)
    assert output.metrics.num_accepted_tokens > 0
    assert len(caplog.records) == 1


class Breakable(ToyRunner):
    """Raises in the pass with this number."""

    fails_at = -1
    num_passes = 0

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """As ToyRunner, but once."""
        self.num_passes += 1
        if self.num_passes == self.fails_at:
            raise RuntimeError("out of memory")
        return super().forward(inputs)


@pytest.mark.parametrize("fails_at", range(1, 10))
@pytest.mark.parametrize(("kind", "part"), [("self", "both"), ("in_cache", "target"), ("in_cache", "draft")])
def test_a_step_that_raises_may_be_repeated(kind: toy.Kind, part: str, fails_at: int) -> None:
    """Loud, and nothing is committed; whoever goes on gets the same output, from drafts of the right text."""

    class Failing(Breakable):
        pass

    Failing.fails_at = fails_at
    target_type, draft_type = (ToyRunner, Failing) if part == "draft" else (Failing, ToyRunner)
    engine = toy.engine(kind, target_type=target_type, draft_type=draft_type, max_num_tokens=24)
    prompts = [PROMPT, PROMPT[::-1] * 2]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 2
    right = [toy.plain(prompt, param).token_ids for prompt, param in zip(prompts, params, strict=True)]

    def script(request: Request, drafts: Sequence[int]) -> int:
        position = request.num_output_tokens + len(drafts)
        return right[int(request.request_id[0])][position] if len(drafts) < 2 else 1

    Audit(engine, window_size=8, num_sink_tokens=3, script=script)
    for index in range(2):
        engine.add_request(str(index), prompts[index], params[index])
    final: dict[str, RequestOutput] = {}
    with pytest.raises(RuntimeError):
        _finish(engine, final)
    toy.check_integrity(engine)
    _finish(engine, final)
    toy.check_integrity(engine)
    assert [final[str(index)].outputs[0].token_ids for index in range(2)] == right


def _finish(engine: Engine, final: dict[str, RequestOutput]) -> None:
    while engine.has_unfinished_requests:
        final |= {output.request_id: output for output in engine.step() if output.finished}
