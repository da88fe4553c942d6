"""What a proposer hands over: tokens, and the distributions that they were drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from magicdec.runtime.rejection import one_hot_probs


@dataclass(slots=True)  # not frozen, which would make it several times as slow to make
class Draft:
    """Draft tokens of one request and step. `probs[i]` [V] is the law that `token_ids[i]` was drawn from.

    None stands for one-hot rows: a proposer that looked its tokens up, or took the arg-max, has drawn nothing, and the
    law puts all weight on the token that it names. Whoever draws hands over what it drew from.
    """

    token_ids: list[int]  # [k]
    probs: Sequence[torch.Tensor] | None  # k rows [V]
    token_probs: Sequence[float] = ()  # what `probs` gives each token; looked up where it is not handed over

    def __post_init__(self) -> None:
        if self.probs is None:
            self.token_probs = [1.0] * len(self.token_ids)
            return
        assert len(self.probs) == len(self.token_ids), "every draft token needs its own law"
        if not self.token_probs:
            self.token_probs = [float(row[token]) for row, token in zip(self.probs, self.token_ids, strict=True)]

    def rows(self, target_probs: torch.Tensor) -> Sequence[torch.Tensor] | torch.Tensor:
        """draft_probs: a row [V] for each token; V is that of target_probs [R, V]."""
        return self.probs or one_hot_probs(self.token_ids, target_probs.shape[1])

    def first(self, count: int) -> "Draft":
        """The first `count` tokens alone."""
        if self.probs is None:
            return Draft(self.token_ids[:count], None)
        return Draft(self.token_ids[:count], self.probs[:count], self.token_probs[:count])


NO_DRAFT = Draft([], None)  # plain decoding
