"""Proposers: who makes draft tokens. They return tokens and never change a request."""

from collections.abc import Sequence
from typing import Protocol

from magicdec.runtime.draft import NO_DRAFT, Draft
from magicdec.runtime.request import Request
from magicdec.runtime.scheduler import ScheduledRequest


class Proposer(Protocol):
    """Makes drafts for the scheduled requests."""

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """One draft for each scheduled request, of at most its num_draft_tokens tokens."""
        ...

    def release(self, request: Request) -> None:
        """The request ended or was preempted: drop all that is held for it."""
        ...


class NGramProposer:
    """Prompt lookup: what followed the most recent earlier occurrence of the last n tokens, longest n first.

    Source: prompt lookup decoding (Saxena 2023), as in vLLM's n-gram proposer. It draws nothing, so its drafts are
    one-hot.
    """

    def __init__(self, vocab_size: int, *, min_ngram: int, max_ngram: int) -> None:
        self.vocab_size = vocab_size
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._indexes: dict[str, _NGramIndex] = {}

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Look up a continuation for each request that may draft."""
        return [self._propose(entry) for entry in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's index."""
        self._indexes.pop(request.request_id, None)

    def _propose(self, entry: ScheduledRequest) -> Draft:
        if entry.num_draft_tokens == 0:
            return NO_DRAFT
        request = entry.request
        index = self._indexes.setdefault(request.request_id, _NGramIndex(self.min_ngram, self.max_ngram))
        return Draft(index.continuation(request.token_ids, entry.num_draft_tokens))


class _NGramIndex:
    """Where each n-gram of a sequence last ended; grows with the sequence, so a look-up does not scan it."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def continuation(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Up to num_tokens tokens that followed the latest earlier occurrence of the sequence's last n-gram."""
        self._update(token_ids)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[-size:])) if len(token_ids) > size else None
            if end is not None:
                return token_ids[end : end + num_tokens]
        return []

    def _update(self, token_ids: list[int]) -> None:
        """Index all n-grams that end before the last token; the last one is what is looked up."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if end >= size:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)


class PlainProposer:
    """Proposes nothing: an engine for plain decoding only."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Empty drafts."""
        return [NO_DRAFT for _ in scheduled]

    def release(self, request: Request) -> None:
        """Nothing is held."""
