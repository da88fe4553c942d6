"""What a proposer hands over: tokens, and the distributions that they were drawn from."""

from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

from magicdec.runtime.sampling.acceptance import one_hot_probs


@dataclass(slots=True)  # not frozen, which would make it several times as slow to make
class Draft:
    """Draft tokens of one request and step, and the distribution that each was drawn from.

    None stand for one-hot rows: a proposer that looked its tokens up, or took the arg-max, has drawn nothing, and all
    weight is on the token that it names. Whoever draws hands over what it drew from: tables [R, V] that the requests
    of a pass share, and which of their rows is this request's.
    """

    token_ids: list[int] = field(default_factory=list)  # [k]
    table_rows: list[int] = field(default_factory=list)  # [k] or none: of each token in the tables
    distributions: list[torch.Tensor] = field(default_factory=list)  # [k] or none: tables [R, V]
    token_probs: list[float] = field(default_factory=list)  # [k] what each token's own gives it, or none
    noise: list[torch.Tensor] = field(default_factory=list)  # [k] of what the coupled rule drew with, or none

    def row(self, index: int, vocab_size: int) -> torch.Tensor:
        """draft_probs [vocab_size] of one token."""
        if not self.distributions:
            return one_hot_probs(self.token_ids[index : index + 1], vocab_size)[0]
        return self.distributions[index][self.table_rows[index]]

    def rows(self, vocab_size: int) -> torch.Tensor:
        """draft_probs [k, vocab_size]."""
        if not self.distributions:
            return one_hot_probs(self.token_ids, vocab_size)
        return torch.stack([table[row] for table, row in zip(self.distributions, self.table_rows, strict=True)])

    def drawn_probs(self) -> list[float]:
        """[k] the probability that each token was drawn with; the coupled rule needs none, and keeps none."""
        assert len(self.token_probs) == len(self.distributions)
        return self.token_probs or [1.0] * len(self.token_ids)

    def first(self, count: int) -> "Draft":
        """The first `count` tokens alone."""
        return Draft(
            self.token_ids[:count],
            self.table_rows[:count],
            self.distributions[:count],
            self.token_probs[:count],
            self.noise[:count],
        )


class _Nothing(list[Any]):
    """An empty list that stays so."""

    def append(self, _: object) -> NoReturn:
        """Refused."""
        raise TypeError("NO_DRAFT is shared by all requests that draft nothing; make a Draft to add tokens to")

    extend = __iadd__ = append


NO_DRAFT: Final = Draft(*(_Nothing() for _ in range(5)))  # plain decoding
