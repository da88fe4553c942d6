"""What a proposer hands over: tokens, and the distributions that they were drawn from."""

from dataclasses import dataclass

import torch

from magicdec.runtime.rejection import one_hot_probs


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one request and step. `probs[i]` is the law that `token_ids[i]` was drawn from; never absent.

    A deterministic proposer hands over one-hot rows: its law puts all weight on the token that it names.
    """

    token_ids: list[int]  # [k]
    probs: torch.Tensor  # [k, V]

    def __post_init__(self) -> None:
        assert self.probs.shape[0] == len(self.token_ids), "every draft token needs its own distribution"


def no_draft(vocab_size: int) -> Draft:
    """The empty draft: plain decoding."""
    return Draft([], torch.empty(0, vocab_size))


def one_hot_draft(token_ids: list[int], vocab_size: int) -> Draft:
    """A draft from a proposer that does not draw."""
    return Draft(token_ids, one_hot_probs(token_ids, vocab_size))
