"""Drafts by prompt lookup: no model."""

from collections.abc import Sequence

import numpy as np

from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft


class NGramProposer:
    """Prompt lookup: what followed the most recent earlier occurrence of the last n tokens, longest n first.

    Source: prompt lookup decoding (Saxena 2023), as in vLLM's n-gram proposer. It draws nothing, so its drafts are
    one-hot.
    """

    def __init__(self, *, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._histories: dict[str, _History] = {}

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Look up a continuation for each request that may draft."""
        return [self._propose(entry) for entry in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's tokens."""
        self._histories.pop(request.request_id, None)

    def _propose(self, entry: ScheduledRequest) -> Draft:
        if entry.num_draft_tokens == 0:
            return NO_DRAFT
        request = entry.request
        history = self._histories.setdefault(request.request_id, _History())
        return Draft(history.continuation(request.token_ids, entry.num_draft_tokens, self.min_ngram, self.max_ngram))


class _History:
    """A request's tokens where they can be searched; grows with the request.

    A search reads them all, which takes microseconds. To note where each n-gram last stood takes hundreds of times as
    long and much memory for every prompt, and only hundreds of look-ups in it would earn that back.
    """

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int64)
        self._length = 0

    def continuation(self, token_ids: list[int], num_tokens: int, min_ngram: int, max_ngram: int) -> list[int]:
        """Up to num_tokens tokens that followed the latest earlier occurrence of the longest n-gram at the end."""
        self._append(token_ids[self._length :])
        tokens = self._tokens[: self._length]
        ends, found = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1, None
        for size in range(1, max_ngram + 1):
            ends = ends[ends >= size]
            ends = ends[tokens[ends - size] == tokens[-size]]
            if not len(ends):
                break
            if size >= min_ngram:
                found = int(ends[-1])
        return [] if found is None else token_ids[found : found + num_tokens]

    def _append(self, new: list[int]) -> None:
        length = self._length + len(new)
        if length > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._length], np.empty(length, dtype=np.int64)])
        self._tokens[self._length : length] = new
        self._length = length
