"""Drafts from a model that sees each sequence through a bounded view: self-speculation and separate draft alike."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from magicdec.errors import RequestError
from magicdec.runtime.draft import NO_DRAFT, Draft
from magicdec.runtime.draft_cache import DraftCache
from magicdec.runtime.model_input import ModelInput
from magicdec.runtime.model_runner import ModelRunner
from magicdec.runtime.request import Request
from magicdec.runtime.sampler import DraftToken, sample_draft_tokens
from magicdec.runtime.scheduler import ScheduledRequest

_log = logging.getLogger(__name__)


@dataclass
class _Work:
    """A request's draft in the making."""

    request: Request
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    probs: list[torch.Tensor] = field(default_factory=list)  # none if the tokens are arg-maxima
    token_probs: list[float] = field(default_factory=list)

    @property
    def draft(self) -> Draft:
        return Draft(self.tokens, self.probs or None, self.token_probs)

    def add(self, token: DraftToken) -> None:
        self.tokens.append(token.token_id)
        if token.probs is not None:
            self.probs.append(token.probs)
            self.token_probs.append(token.prob)


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
        wanted = [e for e in scheduled if e.num_draft_tokens > 0 and e.request not in self._given_up]
        work = [_Work(entry.request, entry.num_draft_tokens) for entry in wanted]
        try:
            self._draw_all(work)
        except Exception:  # the caches count rows as read that may never have been computed
            for each in work:
                self.cache.release(each.request)
            raise
        drafts = {each.request: each.draft for each in work}
        return [drafts.get(entry.request, NO_DRAFT) for entry in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's view; a preempted one does not draft again if it has been given up."""
        self.cache.release(request)
        if request.is_finished:
            self._given_up.discard(request)

    def _draw_all(self, active: list[_Work]) -> None:
        if not active:
            return
        inputs = self.cache.catch_up([work.request for work in active])
        for num_drafts in itertools.count(1):
            self._draw(active, inputs)
            active = [
                work for work in active if len(work.tokens) < work.num_tokens and work.request not in self._given_up
            ]
            if not active:
                return
            requests, last = [work.request for work in active], [work.tokens[-1] for work in active]
            inputs = self.cache.feed(requests, last, num_drafts)

    def _draw(self, active: list[_Work], inputs: ModelInput) -> None:
        """One packed draft pass, and one more token for every active request."""
        logits = self.runner.forward(inputs)  # [len(active), V]
        requests, drafts = [work.request for work in active], [work.tokens for work in active]
        for work, token in zip(active, sample_draft_tokens(requests, logits, drafts), strict=True):
            if isinstance(token, RequestError):
                self._give_up(work.request, token)
            else:
                work.add(token)

    def _give_up(self, request: Request, error: RequestError) -> None:
        _log.warning("request %s goes on without drafts, its draft model failed: %s", request.request_id, error)
        self._given_up.add(request)
        self.cache.release(request)
