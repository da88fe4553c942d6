"""The rules and draws of one request, or of one row, by the functions that decide many at once.

of: the module `acceptance`, or a faulty copy of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magicdec.runtime.sampling import acceptance, draws
from magicdec.runtime.sampling.acceptance import VerifyOutput
from magicdec.runtime.sampling.draws import Purpose


def rejection_sample(
    target_probs: torch.Tensor,  # [k + 1, V]
    draft_probs: Sequence[torch.Tensor] | torch.Tensor,  # [k, V]
    draft_token_ids: Sequence[int],  # [k]
    accept_draws: Sequence[float],  # [k], in [0, 1)
    sample_draws: Sequence[float],  # [k + 1], in [0, 1): the recovered token at i, or the bonus token
    *,
    of: Any = acceptance,
) -> VerifyOutput:
    """`rejection_sample_all` of one request."""
    assert target_probs.shape[0] == len(draft_token_ids) + 1 == len(sample_draws), "one target row and draw a token"
    assert len(draft_probs) == len(draft_token_ids) == len(accept_draws), "one draft row and accept draw a draft token"
    token_probs = [float(row[token]) for row, token in zip(draft_probs, draft_token_ids, strict=True)]
    both = np.asarray(accept_draws, dtype=np.float64), np.asarray(sample_draws, dtype=np.float64)
    (out,) = of.rejection_sample_all(target_probs, lambda _, i: draft_probs[i], token_probs, [draft_token_ids], *both)
    assert isinstance(out, of.VerifyOutput)
    return out  # type: ignore[no-any-return]  # of a copy, its own


def coupled_sample(
    target_probs: torch.Tensor,  # [k + 1, V]
    draft_token_ids: Sequence[int],  # [k]
    noise: Sequence[torch.Tensor] | torch.Tensor,  # [k + 1, V], standard Gumbel, of the position of each row
    *,
    of: Any = acceptance,
) -> VerifyOutput:
    """`coupled_sample_all` of one request."""
    assert target_probs.shape[0] == len(draft_token_ids) + 1 == len(noise), (
        "one target row and one row of noise a token"
    )
    (out,) = of.coupled_sample_all(target_probs, [draft_token_ids], lambda _, i: noise[i][None])
    return out  # type: ignore[no-any-return]


def sample(probs: torch.Tensor, draw: float) -> int:
    """`sample_all` of one row [V]."""
    return acceptance.sample_all(probs[None], np.array([draw]))[0]


def sample_gumbel(probs: torch.Tensor, noise: torch.Tensor) -> int:
    """`sample_gumbel_all` of one row [V]."""
    return acceptance.sample_gumbel_all(probs[None], noise[None])[0]


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """The noise [vocab_size] of one position, word by word instead of by `gumbels`."""
    noise = np.empty(vocab_size)
    draws._to_noise(draws._words_of_one(seed, position, Purpose.GUMBEL, vocab_size), noise)
    return torch.from_numpy(noise)
