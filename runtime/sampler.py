"""Chooses tokens for one request from logits: draft tokens, and what verification makes of them.

Every draw is keyed by (seed, position of the token to be chosen, purpose). The token that is committed at a position
depends on the draws of that position alone, so draws of drafts that were thrown away may be used again.
"""

import torch

from magicdec.runtime.draft import Draft
from magicdec.runtime.draws import Purpose, gumbel, uniform
from magicdec.runtime.rejection import VerifyOutput, coupled_sample, rejection_sample, sample, sample_gumbel
from magicdec.runtime.request import Request


def sample_draft_token(request: Request, logits: torch.Tensor, drafts: list[int]) -> tuple[int, torch.Tensor]:
    """Draw the next draft token; returns it with the very distribution that it was drawn from.

    logits: [1, V] after the committed tokens and `drafts`. The distribution is [V].
    """
    probs = request.logits_processor.probs(logits, drafts, first=len(drafts))[0]  # [V]
    position = len(request.token_ids) + len(drafts)
    if request.params.acceptance_rule == "coupled":
        return sample_gumbel(probs, gumbel(request.seed, position, probs.shape[-1])), probs
    return sample(probs, uniform(request.seed, position, Purpose.DRAFT)), probs


def verify(request: Request, logits: torch.Tensor, draft: Draft) -> VerifyOutput:
    """Accept a prefix of the draft, exactly, and choose one more token. logits: [k + 1, V], k = drafts, may be 0."""
    target_probs = request.logits_processor.probs(logits, draft.token_ids)  # [k + 1, V]
    first = len(request.token_ids)
    positions = range(first, first + len(draft.token_ids) + 1)
    if request.params.acceptance_rule == "coupled":
        vocab_size = target_probs.shape[-1]
        noise = torch.stack([gumbel(request.seed, position, vocab_size) for position in positions])  # [k + 1, V]
        return coupled_sample(target_probs, draft.token_ids, noise)
    return rejection_sample(
        target_probs,
        draft.probs.to(target_probs.device),
        draft.token_ids,
        [uniform(request.seed, position, Purpose.ACCEPT) for position in positions[:-1]],
        [uniform(request.seed, position, Purpose.SAMPLE) for position in positions],
    )
