"""Drafts from a model that sees each sequence through a bounded view: self-speculation and separate draft alike."""

import logging
from collections.abc import Sequence

from magicdec.errors import RequestError
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.drafting.views import DraftView
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.sampler import draw_next
from magicdec.runtime.engine.scheduler import ScheduledRequest
from magicdec.runtime.runners.interface import ModelRunner
from magicdec.runtime.sampling.draft import NO_DRAFT, Draft

logger = logging.getLogger(__name__)


class ModelProposer:
    """Runs the draft model one token at a time, all requests packed; shorter drafts drop out as they end.

    A request whose draft logits cannot be drawn from (NaN) gets no more drafts: it goes on by plain decoding.
    """

    def __init__(self, runner: ModelRunner, cache: DraftView) -> None:
        self.runner = runner
        self.cache = cache
        self._given_up: set[Request] = set()

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Autoregressive drafts, each token drawn from the request's own processed distribution."""
        wanted = [e for e in scheduled if e.num_draft_tokens > 0 and e.request not in self._given_up]
        drafts = {entry.request: Draft() for entry in wanted}
        try:
            self._draw_all(wanted, drafts)
        except Exception:  # the caches count rows as read that may never have been computed
            for request in drafts:
                self.cache.release(request)
            raise
        return [drafts.get(entry.request, NO_DRAFT) for entry in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's view; a preempted one does not draft again if it has been given up."""
        self.cache.release(request)
        if request.is_finished:
            self._given_up.discard(request)

    def _draw_all(self, wanted: Sequence[ScheduledRequest], drafts: dict[Request, Draft]) -> None:
        """Token by token; those that end or fail drop out."""
        for count in range(max((entry.num_draft_tokens for entry in wanted), default=0)):
            requests = [e.request for e in wanted if e.num_draft_tokens > count and e.request not in self._given_up]
            if not requests:
                return
            growing = [drafts[request] for request in requests]
            logits = self.runner.forward(self._inputs(requests, growing, count))  # [len(requests), V]
            for request, error in zip(requests, draw_next(requests, logits, growing), strict=True):
                if error is not None:
                    self._give_up(request, error)

    def _inputs(self, requests: Sequence[Request], drafts: Sequence[Draft], count: int) -> ModelInput:
        """Of the pass that follows `count` draft tokens each."""
        if count == 0:
            return self.cache.catch_up(requests)
        return self.cache.feed(requests, [draft.token_ids[-1] for draft in drafts], count)

    def _give_up(self, request: Request, error: RequestError) -> None:
        logger.warning("request %s goes on without drafts, its draft model failed: %s", request.request_id, error)
        self._given_up.add(request)
        self.cache.release(request)
