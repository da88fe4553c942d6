"""Prompt lookup against a naive search of the whole sequence."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.engine.proposer import PlainProposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft
from tests.support import toy


def _naive(tokens: list[int], min_ngram: int, max_ngram: int, count: int) -> list[int]:
    """Longest n first; of all earlier occurrences the latest."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + count]
    return []


def _draft(proposer: NGramProposer, request: Request, count: int) -> list[int]:
    (draft,) = proposer.propose([ScheduledRequest(request, 1, count)])
    probs = draft.rows(toy.VOCAB_SIZE)
    assert probs.shape == (len(draft.token_ids), toy.VOCAB_SIZE)
    assert torch.equal(probs.argmax(-1), torch.tensor(draft.token_ids, dtype=torch.long))
    assert probs.sum() == len(draft.token_ids), "one-hot rows"
    return draft.token_ids


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    growth=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    count=st.integers(0, 5),
)
def test_same_as_a_naive_search(prompt: list[int], growth: list[list[int]], sizes: tuple[int, int], count: int) -> None:
    """While the sequence grows, by any number of tokens at a time."""
    min_ngram, max_ngram = sizes[0], sizes[0] + sizes[1]
    proposer, request = NGramProposer(min_ngram=min_ngram, max_ngram=max_ngram), toy.request(prompt)
    for tokens in [[], *growth]:
        request.token_ids += tokens
        assert _draft(proposer, request, count) == _naive(request.token_ids, min_ngram, max_ngram, count)


def test_long_match_wins_over_a_later_short_one() -> None:
    """1 2 came before 7; 2 alone came later before 9."""
    proposer = NGramProposer(min_ngram=1, max_ngram=2)
    assert _draft(proposer, toy.request([1, 2, 7, 8, 2, 9, 1, 2]), 2) == [7, 8]


def test_a_draft_may_be_short_or_empty() -> None:
    """What followed may end with the sequence; nothing may have come before."""
    proposer = NGramProposer(min_ngram=1, max_ngram=3)
    assert _draft(proposer, toy.request([4, 4], "a"), 5) == [4]
    assert _draft(proposer, toy.request([1, 2, 3], "b"), 5) == []
    assert _draft(proposer, toy.request([1], "c"), 5) == []


def test_requests_do_not_mix_and_a_released_one_starts_anew() -> None:
    """A name may come again with another text."""
    proposer = NGramProposer(min_ngram=1, max_ngram=3)
    first, second = toy.request([1, 2, 1], "a"), toy.request([1, 3, 1], "b")
    drafts = proposer.propose([ScheduledRequest(first, 1, 1), ScheduledRequest(second, 1, 1)])
    assert [draft.token_ids for draft in drafts] == [[2], [3]]
    proposer.release(first)
    assert _draft(proposer, toy.request([5, 6, 5], "a"), 1) == [6]
    proposer.release(toy.request([1], "unknown"))


@pytest.mark.parametrize("length", [2_000, 200_000])
def test_a_look_up_takes_over_only_what_is_new(length: int) -> None:
    """To read a list of a prompt's length takes dozens of times as long as to search the copy."""
    rng = random.Random(0)
    proposer = NGramProposer(min_ngram=1, max_ngram=3)
    request = toy.request([rng.randrange(toy.VOCAB_SIZE) for _ in range(length)])
    _draft(proposer, request, 1)

    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            got = super().__getitem__(key)
            self.num_read += len(got) if isinstance(got, list) else 1
            return got

    request.token_ids = Counted([*request.token_ids, 1])
    _draft(proposer, request, 1)
    assert request.token_ids.num_read < 20


def test_the_draft_that_all_share_cannot_grow() -> None:
    with pytest.raises(TypeError, match="NO_DRAFT is shared"):
        NO_DRAFT.token_ids.append(1)
    with pytest.raises(TypeError, match="NO_DRAFT is shared"):
        NO_DRAFT.token_probs += [0.5]
    assert Draft() == NO_DRAFT


def test_plain_proposer_proposes_nothing() -> None:
    """Whatever it is asked for."""
    (draft,) = PlainProposer().propose([ScheduledRequest(toy.request([1, 1, 1]), 1, 4)])
    assert draft.token_ids == []
    assert len(draft.rows(toy.VOCAB_SIZE)) == 0
