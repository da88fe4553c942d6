"""LogitsProcessor in the corners: equals, order, rounding, padding, histories, refusals, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from magicdec.errors import RequestError
from magicdec.runtime.sampling import logits as logits_module
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams


def softmax(row: list[float]) -> list[float]:
    return torch.tensor(row, dtype=torch.float64).softmax(dim=0).tolist()


def one_row(logits: list[float], history: Sequence[int] = (), **options: Any) -> list[float]:
    processor = LogitsProcessor(SamplingParams(**options), [], len(logits))
    return processor.probs(torch.tensor([logits], dtype=torch.float64), history, len(history))[0].tolist()


def kept(logits: list[float], **options: Any) -> list[int]:
    return [token for token, prob in enumerate(one_row(logits, **options)) if prob > 0]


def test_equal_logits_share_one_fate() -> None:
    assert kept([1, 3, 3, 0, 3], top_k=2) == [1, 2, 4]
    assert kept([1, 3, 3, 0, 3], top_p=0.4) == [1, 2, 4]
    assert kept([1, 3, 3, 0, 3], min_p=1.0) == [1, 2, 4]
    assert kept([1, 3, 3, 0, 3], temperature=0) == [1]


def test_top_p_takes_the_token_that_crosses_and_no_more() -> None:
    logits = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    assert kept(logits, top_p=0.4999) == [1]
    assert kept(logits, top_p=0.5001) == [1, 2]
    assert kept(logits, top_p=0.7501) == [0, 1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept([0.0, 0.0, -1000.0], top_p=1 - 2.0**-53) == [0, 1]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_needs_no_full_sort(monkeypatch: pytest.MonkeyPatch, top_p: float, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 2
    processor = LogitsProcessor(SamplingParams(top_p=top_p), [], 5000)
    guessed = processor.probs(rows, [0, 0])
    monkeypatch.setattr(logits_module, "_TOP_P_GUESS", 5000)
    assert torch.equal(processor.probs(rows, [0, 0]), guessed)
    if dtype == torch.float64:  # no equals here: the kept ones are those before the sum reaches top_p, and one more
        below = rows.softmax(dim=1).sort(dim=1, descending=True).values.cumsum(dim=1) < top_p
        assert (guessed > 0).sum(dim=1).tolist() == (below.sum(dim=1) + 1).tolist()


def test_top_p_that_rounding_never_reaches_keeps_all() -> None:
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    processor = LogitsProcessor(SamplingParams(top_p=1 - 2.0**-53), [], 50)
    rows = rows[rows.softmax(dim=1).double().sum(dim=1) < 1 - 2.0**-53]
    assert len(rows) > 0
    assert bool((processor.probs(rows, [0] * 7) > 0).all())


def test_cut_offs_follow_one_another() -> None:
    """After top_k = 2 the first token alone holds 0.6: of all three it would hold 0.5, and top_p = 0.55 keep two."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]


def test_temperature_comes_before_the_cut_offs_and_after_the_penalties() -> None:
    assert one_row([2.0, 0.0], temperature=2) == pytest.approx(softmax([1.0, 0.0]))
    assert kept([2.0, 0.0], temperature=10, min_p=0.8) == [0, 1]
    assert one_row([2.0, 0.0], history=[0], temperature=2, presence_penalty=1.0) == pytest.approx(softmax([0.5, 0.0]))


def test_min_tokens_counts_the_drafts_of_each_row() -> None:
    processor = LogitsProcessor(SamplingParams(min_tokens=3, stop_token_ids=[2]), [], 4, [0])
    processor.append([1])
    probs = processor.probs(torch.zeros(3, 4), [1, 1])
    assert probs.tolist() == [[0, 0.5, 0, 0.5], [0, 0.5, 0, 0.5], [0.25] * 4]


def test_bad_words_reach_from_output_into_drafts() -> None:
    processor = LogitsProcessor(SamplingParams(), [1, 2], 4, bad_words_ids=[[1, 2, 3], [0]])
    probs = processor.probs(torch.zeros(1, 4), ())
    assert probs.tolist() == [pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])]  # the prompt completes nothing
    for token in (3, 3, 1):
        processor.append([token])
    probs = processor.probs(torch.zeros(3, 4), [2, 1])
    assert [row[3] for row in probs.tolist()] == pytest.approx([1 / 3, 0, 1 / 3])
    processor.append([2])
    assert float(processor.probs(torch.zeros(1, 4), ())[0, 3]) == 0


def test_repetition_penalty_sees_prompt_output_and_drafts() -> None:
    processor = LogitsProcessor(SamplingParams(repetition_penalty=2.0, temperature=1), [0], 4)
    processor.append([1])
    rows = torch.tensor([[2.0, -1.0, 4.0, 0.0]] * 2, dtype=torch.float64)
    probs = processor.probs(rows, [2])
    assert probs[0].tolist() == pytest.approx(softmax([1.0, -2.0, 4.0, 0.0]))
    assert probs[1].tolist() == pytest.approx(softmax([1.0, -2.0, 2.0, 0.0]))


def test_bias_comes_before_the_repetition_penalty() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0})
    probs = LogitsProcessor(params, [0], 2).probs(torch.tensor([[1.0, 1.0]], dtype=torch.float64), ())
    assert probs[0].tolist() == pytest.approx(softmax([2.0, 1.0]))


@pytest.mark.parametrize("greedy", [True, False])
def test_padding_columns_get_nothing_and_missing_ones_too(greedy: bool) -> None:
    processor = LogitsProcessor(SamplingParams(temperature=0 if greedy else 1), [], 3)
    wide = processor.probs(torch.tensor([[1.0, 2.0, 0.0, 50.0]]), ())
    narrow = processor.probs(torch.tensor([[1.0, 2.0]]), ())
    assert wide.shape == narrow.shape == (1, 3)
    assert wide.argmax() == narrow.argmax() == 1
    assert float(narrow[0, 2]) == 0
    assert float(wide.sum()) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_processed_in_float32(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    probs = LogitsProcessor(SamplingParams(), [], 3).probs(rows, ())
    assert torch.equal(probs, rows.float().softmax(1))


@pytest.mark.parametrize("temperature", [1e-5, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1e38])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float, scale: float) -> None:
    rows = torch.tensor([[1.0, 3.0, -3.0, 2.5]]) * scale
    options = SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.01)
    probs = LogitsProcessor(options, [], 4).probs(rows, ())
    assert bool(probs.isfinite().all())
    assert float(probs.sum()) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("value", "named"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_row_that_is_not_a_number_is_refused(temperature: float, value: float, named: str) -> None:
    processor = LogitsProcessor(SamplingParams(temperature=temperature, top_p=0.9), [], 3)
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.0, value, 1.0]])
    with pytest.raises(RequestError, match=f"hold {named}.*dtype"):
        processor.probs(rows, [0])


def test_a_row_without_tokens_is_refused() -> None:
    processor = LogitsProcessor(SamplingParams(min_tokens=1), [], 2, [0], [[1]])
    with pytest.raises(RequestError, match="no token can be drawn"):
        processor.probs(torch.zeros(1, 2), ())
    with pytest.raises(RequestError, match="no token can be drawn"):
        LogitsProcessor(SamplingParams(), [], 2).probs(torch.full((1, 2), -math.inf), ())


def test_more_rows_than_drafts_are_our_fault() -> None:
    with pytest.raises(AssertionError, match="more rows than draft tokens"):
        LogitsProcessor(SamplingParams(presence_penalty=1), [], 2).probs(torch.zeros(3, 2), [0])


def test_inference_mode_may_come_and_go() -> None:
    """The engine runs the model in inference mode; the history's counts must survive in and out of it."""
    processor = LogitsProcessor(SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1), [1], 3)
    with torch.inference_mode():
        processor.append([2])
        rows = torch.zeros(2, 3)
        inside = processor.probs(rows, [0])
    processor.append([0])
    assert torch.equal(processor.probs(rows, [0, 0])[0], inside[1])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0, 99.0]] * 2)  # the last column is padding
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={0: 50.0}, logprobs=2)
    rows = LogitsProcessor(params, [], 4).logprobs(logits, [0, 1])
    raw = [math.log(p) for p in softmax([1.0, 3.0, 2.0, -1.0])]
    assert [list(row) for row in rows] == [[0, 1, 2], [1, 2]]
    assert [row[t].rank for row, t in ((rows[0], 0), (rows[0], 1), (rows[0], 2), (rows[1], 1))] == [3, 1, 2, 1]
    assert rows[0][0].logprob == pytest.approx(raw[0], abs=1e-6)
    assert [row.logprob for row in rows[1].values()] == pytest.approx(raw[1:3], abs=1e-6)


def test_logprobs_of_the_chosen_token_alone_or_none() -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64)
    (alone,) = LogitsProcessor(SamplingParams(logprobs=0), [], 3).logprobs(logits, [2])
    assert list(alone) == [2]
    assert alone[2] == pytest.approx((-math.log(3), 1))
    assert LogitsProcessor(SamplingParams(), [], 3).logprobs(logits, [2]) == []
    assert len(LogitsProcessor(SamplingParams(logprobs=20), [], 3).logprobs(logits, [2])[0]) == 3
