"""LogitsProcessor against a naive reference: one row at a time, plain lists, the whole history walked each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams

V = 7
INF = math.inf
TOKENS = st.integers(0, V - 1)


@dataclass(frozen=True)
class Situation:
    """A request in the middle of its output, and the rows that one call processes."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    first: int
    rows: list[list[float]]
    eos: list[int]
    bad_words: list[list[int]]

    def processor(self, more_output: Sequence[int] = ()) -> LogitsProcessor:
        made = LogitsProcessor(self.params, self.prompt, V, self.eos, self.bad_words)
        made.append(self.output)
        for token in more_output:
            made.append([token])
        return made

    def probs(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return self.processor().probs(torch.tensor(self.rows, dtype=dtype), self.drafts, self.first)


OPTIONS = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([-1, 0, 1, 2, 3, 6, 7, 50]),
    "top_p": st.sampled_from([1.0, 0.9, 0.61, 0.33, 0.05]),
    "min_p": st.sampled_from([0.0, 0.04, 0.31]),
    "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 0.6, -0.4]),
    "frequency_penalty": st.sampled_from([0.0, 0.35, -0.2]),
    "min_tokens": st.integers(0, 5),
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-3.0, 0.5, 2.25]), min_size=1, max_size=3),
    "stop_token_ids": st.lists(TOKENS, max_size=1),
}


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Any subset of the options, on logits from a coarse grid so that equals are common."""
    options: dict[str, Any] = {name: draw(values) for name, values in OPTIONS.items() if draw(st.booleans())}
    num_rows, first = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    logit = st.integers(-12, 12).map(lambda x: x / 4)
    return Situation(
        params=SamplingParams(**options),
        prompt=draw(st.lists(TOKENS, max_size=6)),
        output=draw(st.lists(TOKENS, max_size=5)),
        drafts=draw(st.lists(TOKENS, min_size=first + num_rows - 1, max_size=first + num_rows - 1)),
        first=first,
        rows=draw(st.lists(st.lists(logit, min_size=V, max_size=V), min_size=num_rows, max_size=num_rows)),
        eos=draw(st.lists(TOKENS, max_size=1)),
        bad_words=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=2)),
    )


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [w / sum(weights) for w in weights]


def processed(s: Situation, row: list[float], output: list[int]) -> list[float]:
    """Masks and penalties, in the order of the issue."""
    p, row = s.params, list(row)
    for word in s.bad_words:
        if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]:
            row[word[-1]] = -INF
    for token, bias in (p.logit_bias or {}).items():
        row[token] += bias
    if len(output) < p.min_tokens:
        for token in {*s.eos, *p.stop_token_ids}:
            row[token] = -INF
    for token in range(V):
        if token in s.prompt or token in output:
            row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
        row[token] -= p.frequency_penalty * output.count(token)
        row[token] -= p.presence_penalty * (token in output)
    return row


def cut(p: SamplingParams, row: list[float]) -> list[float]:
    """min_p, top_k, top_p, each on the probabilities that the one before left."""
    probs = softmax(row)
    assume(all(abs(x - p.min_p * max(probs)) > 1e-9 for x in probs))
    row = [x if prob >= p.min_p * max(probs) else -INF for x, prob in zip(row, probs, strict=True)]
    if p.top_k > 0:
        smallest = sorted(row, reverse=True)[: p.top_k][-1]
        row = [x if x >= smallest else -INF for x in row]
    if p.top_p < 1:
        order = sorted(range(V), key=lambda t: -row[t])
        probs, kept, total = softmax(row), [], 0.0
        for token in order:
            assume(abs(total - p.top_p) > 1e-9)
            if total < p.top_p:
                kept.append(token)
                total += probs[token]
        row = [x if x >= row[kept[-1]] else -INF for x in row]
    return row


def reference(s: Situation, i: int) -> list[float]:
    row = processed(s, s.rows[i], s.output + s.drafts[: s.first + i])
    if s.params.temperature == 0:
        return [float(t == row.index(max(row))) for t in range(V)]
    return softmax(cut(s.params, [(x - max(row)) / s.params.temperature for x in row]))


def has_tokens_left(s: Situation) -> bool:
    banned = {w[-1] for w in s.bad_words} | set(s.eos) | set(s.params.stop_token_ids)
    return len(banned) < V


@settings(max_examples=400, deadline=None)
@given(situations().filter(has_tokens_left))
def test_each_row_is_what_the_reference_makes_of_it(s: Situation) -> None:
    expected = [reference(s, i) for i in range(len(s.rows))]
    torch.testing.assert_close(s.probs(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(situations().filter(has_tokens_left), st.sampled_from([torch.float32, torch.float64]))
def test_draft_rows_are_bit_for_bit_those_of_plain_decoding(s: Situation, dtype: torch.dtype) -> None:
    """The same row, once with drafts as history, once alone with the drafts committed one by one."""
    together = s.probs(dtype)
    for i, row in enumerate(s.rows):
        alone = s.processor(s.drafts[: s.first + i]).probs(torch.tensor([row], dtype=dtype), ())
        assert torch.equal(together[i : i + 1], alone)


@settings(max_examples=100, deadline=None)
@given(situations().filter(has_tokens_left))
def test_probabilities_are_a_distribution_and_the_call_leaves_no_trace(s: Situation) -> None:
    processor, rows = s.processor(), torch.tensor(s.rows)
    first = processor.probs(rows, s.drafts, s.first)
    assert torch.equal(processor.probs(rows, s.drafts, s.first), first)
    assert torch.equal(rows, torch.tensor(s.rows))
    assert first.dtype == torch.float32
    assert bool((first >= 0).all())
    torch.testing.assert_close(first.sum(dim=1), torch.ones(len(s.rows)))
