"""What the engine reports beside the output: counts, times, progress; and what it refuses at the door."""

import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest

from magicdec.errors import RequestError
from magicdec.runtime.engine.request import RequestGroup
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("kind", toy.DRAFTERS)
def test_rounds_drafts_and_acceptance_add_up(kind: toy.Kind) -> None:
    """Every token is the one of a plain step, the one of a round, or an accepted draft token."""
    engine = toy.engine(kind)
    engine.add_request("0", [1, 2, 3, 1, 2], SamplingParams(max_tokens=40, **GREEDY))
    steps = rounds = 0
    while engine.has_unfinished_requests:
        drafted = sum(request.num_draft_tokens for request in engine.scheduler.running)
        (output,) = engine.step()
        steps += 1
        rounds += output.metrics.num_draft_tokens > drafted
    metrics = output.metrics
    assert metrics.num_output_tokens == 40 == steps + metrics.num_accepted_tokens
    assert metrics.num_rounds == rounds > 1
    assert metrics.acceptance_length == 1 + metrics.num_accepted_tokens / metrics.num_rounds
    assert metrics.acceptance_rate == metrics.num_accepted_tokens / metrics.num_draft_tokens


@pytest.mark.parametrize("kind", ["plain", "self"])
def test_an_output_stays_as_it_was_whenever_it_is_looked_at(kind: toy.Kind) -> None:
    """Lists are copied late, and are lists of the caller's own."""
    engine = toy.engine(kind)
    engine.add_request("0", [1, 2, 3, 1, 2], SamplingParams(max_tokens=30, **GREEDY))
    at_once: list[Any] = []
    outputs = []
    while engine.has_unfinished_requests:
        (output,) = engine.step()
        outputs.append(output)
        running = engine.scheduler.running
        at_once.append(running[0].output_token_ids if running else output.outputs[0].token_ids)
    assert at_once[0] != at_once[-1]
    for output, token_ids in zip(outputs, at_once, strict=True):
        (completion,) = output.outputs
        stored = pickle.loads(pickle.dumps(completion))
        assert len(token_ids) == output.metrics.num_output_tokens
        assert asdict(completion)["token_ids"] == completion.token_ids == stored.token_ids == token_ids
        assert len(completion.token_origins) == len(completion.token_lengths) == len(token_ids)
        assert completion == stored == replace(completion)
        assert replace(completion, error="why").error == "why"
        completion.token_ids.clear()
    with pytest.raises(AttributeError, match="nothing"):
        getattr(completion, "nothing")  # noqa: B009


def test_times_of_several_outputs_span_all_of_them() -> None:
    """From arrival to the first token of any, and from there to the last token of any."""
    requests = [toy.request([1, 2], str(index)) for index in range(3)]
    for index, request in enumerate(requests):
        request.arrival_time = 10.0
        request.first_token_time, request.last_token_time = 13.0 - index, 20.0 + index
    metrics = RequestGroup("0", None, [], requests).output().metrics
    assert (metrics.prefill_seconds, metrics.decode_seconds) == (1.0, 11.0)
    for request in requests:
        request.first_token_time = request.last_token_time = None
    metrics = RequestGroup("0", None, [], requests).output().metrics
    assert (metrics.prefill_seconds, metrics.decode_seconds) == (0.0, 0.0)


def test_queue_time_ends_with_a_place_in_the_batch() -> None:
    """In a batch of one the second request waits until the first has ended; a preemption later is no arrival."""
    engine = toy.engine("self", max_batch_size=1)
    for name in ("0", "1"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=8, **GREEDY))
    first, second = engine.scheduler.waiting
    final = toy.drain(engine)
    assert first.admission_time is not None
    assert second.admission_time is not None
    assert first.last_token_time is not None
    assert first.arrival_time < first.admission_time < first.last_token_time < second.admission_time
    assert final["1"].metrics.queue_seconds == second.admission_time - second.arrival_time
    assert final["1"].metrics.queue_seconds < final["1"].metrics.prefill_seconds


def test_progress_counts_prompts_that_are_still_read() -> None:
    """Over all open requests, waiting ones included; done ones no longer."""
    engine = toy.engine("plain", max_num_tokens=8)
    engine.add_request("0", [1] * 10, SamplingParams(max_tokens=2, **GREEDY))
    engine.add_request("1", [2] * 20, SamplingParams(max_tokens=2, **GREEDY))
    progress = [engine.prompt_progress()]
    while engine.has_unfinished_requests:
        engine.step()
        progress.append(engine.prompt_progress())
    assert progress == [(0, 30), (8, 30), (6, 20), (13, 20), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 20, {}, r"has 20 tokens, and max_seq_len=20 .* at most 19"),
        ([1, 16], {}, r"token id 16; ids must be in 0\.\.15"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": [16]}, "stop_token_ids holds token id 16"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias holds token id 99"),
        ([1], {"num_draft_tokens": 4}, "num_draft_tokens=4 is more than this engine's max_draft_len=3"),
    ],
)
def test_what_cannot_be_served_is_refused_and_changes_nothing(
    prompt: list[int], params: dict[str, Any], match: str
) -> None:
    """With the value and the mend; the name stays free."""
    engine = toy.engine("self", max_seq_len=20)
    with pytest.raises(RequestError, match=match):
        engine.add_request("0", prompt, SamplingParams(**params))
    assert not engine.has_unfinished_requests
    engine.check_integrity()
    longest, param = [1] * 19, SamplingParams(seed=0, num_draft_tokens=3)
    (output,) = toy.run(engine, [longest], [param])
    assert output.outputs[0].token_ids == toy.plain(longest, param, max_seq_len=20).token_ids


def test_a_bad_word_that_the_model_has_no_id_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may know more ids than its model."""
    engine = toy.engine("self")
    monkeypatch.setattr(toy.ToyTokenizer, "encode_plain", lambda *_: [1, toy.VOCAB_SIZE])
    with pytest.raises(RequestError, match=r"bad_words holds token id 16; ids must be in 0\.\.15"):
        engine.add_request("0", [1], SamplingParams(bad_words=["a"]))
    assert not engine.has_unfinished_requests
    engine.check_integrity()


def test_a_name_in_use_is_refused() -> None:
    """Until its request has ended."""
    engine = toy.engine("plain")
    engine.add_request("0", [1], SamplingParams(seed=0))
    with pytest.raises(RequestError, match="request id '0' is in use"):
        engine.add_request("0", [2], SamplingParams(seed=0))
    toy.drain(engine)
    toy.run(engine, [[1]], [SamplingParams(seed=0)])
