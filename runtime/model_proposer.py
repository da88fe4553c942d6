"""Drafts from a model that sees each sequence through a bounded view: self-speculation and separate draft alike."""

from collections.abc import Sequence

import torch

from magicdec.runtime.draft import Draft, no_draft
from magicdec.runtime.draft_cache import DraftCache
from magicdec.runtime.model_input import SequenceInput, pack
from magicdec.runtime.model_runner import ModelRunner
from magicdec.runtime.request import Request
from magicdec.runtime.sampler import sample_draft_token
from magicdec.runtime.scheduler import ScheduledRequest


class ModelProposer:
    """Runs the draft model one token at a time, all requests packed; shorter drafts drop out as they end."""

    def __init__(self, runner: ModelRunner, cache: DraftCache) -> None:
        self.runner = runner
        self.cache = cache

    def propose(self, scheduled: Sequence[ScheduledRequest]) -> list[Draft]:
        """Autoregressive drafts, each token drawn from the request's own processed distribution."""
        tokens: dict[str, list[int]] = {entry.request.request_id: [] for entry in scheduled}
        probs: dict[str, list[torch.Tensor]] = {entry.request.request_id: [] for entry in scheduled}
        active = [entry for entry in scheduled if entry.num_draft_tokens > 0]
        rows = [self.cache.catch_up(entry.request) for entry in active]
        while active:
            self._draw(active, rows, tokens, probs)
            active = [e for e in active if len(tokens[e.request.request_id]) < e.num_draft_tokens]
            rows = [self._next_row(entry.request, tokens[entry.request.request_id]) for entry in active]
        return [self._draft(tokens[e.request.request_id], probs[e.request.request_id]) for e in scheduled]

    def release(self, request: Request) -> None:
        """Drop the request's view."""
        self.cache.release(request)

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
            token, law = sample_draft_token(entry.request, row, tokens[owner])
            tokens[owner].append(token)
            probs[owner].append(law)

    def _next_row(self, request: Request, drafts: list[int]) -> SequenceInput:
        return self.cache.feed(request, drafts[-1], len(drafts))

    def _draft(self, token_ids: list[int], probs: list[torch.Tensor]) -> Draft:
        return Draft(token_ids, torch.stack(probs)) if token_ids else no_draft(self.runner.vocab_size)
