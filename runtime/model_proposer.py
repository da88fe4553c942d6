"""Drafts from a model that sees each sequence through a bounded view: self-speculation and separate draft alike."""

import logging
from collections.abc import Sequence

import torch

from magicdec.errors import RequestError
from magicdec.runtime.draft import Draft, no_draft
from magicdec.runtime.draft_cache import DraftCache
from magicdec.runtime.model_input import SequenceInput, pack
from magicdec.runtime.model_runner import ModelRunner
from magicdec.runtime.request import Request
from magicdec.runtime.sampler import sample_draft_token
from magicdec.runtime.scheduler import ScheduledRequest

_log = logging.getLogger(__name__)


class ModelProposer:
    """Runs the draft model one token at a time, all requests packed; shorter drafts drop out as they end.

    A request whose draft logits cannot be drawn from (NaN) gets no more drafts: it goes on by plain decoding.
    """

    def __init__(self, runner: ModelRunner, cache: DraftCache) -> None:
        self.runner = runner
        self.cache = cache
        self._given_up: set[Request] = set()

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Autoregressive drafts, each token drawn from the request's own processed distribution."""
        tokens: dict[str, list[int]] = {entry.request.request_id: [] for entry in scheduled}
        probs: dict[str, list[torch.Tensor]] = {entry.request.request_id: [] for entry in scheduled}
        active = [e for e in scheduled if e.num_draft_tokens > 0 and e.request not in self._given_up]
        try:
            self._draw_all(active, tokens, probs)
        except Exception:  # the caches count rows as read that may never have been computed
            for entry in active:
                self.cache.release(entry.request)
            raise
        return [self._draft(tokens[e.request.request_id], probs[e.request.request_id]) for e in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's view; a preempted one does not draft again if it has been given up."""
        self.cache.release(request)
        if request.is_finished:
            self._given_up.discard(request)

    def _draw_all(
        self,
        active: list[ScheduledRequest],
        tokens: dict[str, list[int]],
        probs: dict[str, list[torch.Tensor]],
    ) -> None:
        rows = [self.cache.catch_up(entry.request) for entry in active]
        while active:
            self._draw(active, rows, tokens, probs)
            active = [e for e in active if len(tokens[e.request.request_id]) < e.num_draft_tokens]
            active = [e for e in active if e.request not in self._given_up]
            rows = [self._next_row(entry.request, tokens[entry.request.request_id]) for entry in active]

    def _draw(
        self,
        active: list[ScheduledRequest],
        rows: list[SequenceInput],
        tokens: dict[str, list[int]],
        probs: dict[str, list[torch.Tensor]],
    ) -> None:
        """One packed draft pass, and one more token for every active request."""
        logits = self.runner.forward(pack(rows))  # [len(active), V]
        for entry, row in zip(active, torch.split(logits, 1), strict=True):
            owner = entry.request.request_id
            try:
                token, law = sample_draft_token(entry.request, row, tokens[owner])
            except RequestError as error:
                self._give_up(entry.request, error)
                continue
            tokens[owner].append(token)
            probs[owner].append(law)

    def _give_up(self, request: Request, error: RequestError) -> None:
        _log.warning("request %s goes on without drafts, its draft model failed: %s", request.request_id, error)
        self._given_up.add(request)
        self.cache.release(request)

    def _next_row(self, request: Request, drafts: list[int]) -> SequenceInput:
        return self.cache.feed(request, drafts[-1], len(drafts))

    def _draft(self, token_ids: list[int], probs: list[torch.Tensor]) -> Draft:
        return Draft(token_ids, torch.stack(probs)) if token_ids else no_draft(self.runner.vocab_size)
