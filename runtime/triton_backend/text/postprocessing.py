"""Token ids to text: what the model `postprocessing` computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicdec.errors import RequestError


@dataclass(frozen=True)
class Postprocessor:
    """decode: text of token ids, special tokens left out."""

    decode: Callable[[Sequence[int]], str]
    vocab_size: int

    def __call__(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """OUTPUT [B * beams]: the text of the first SEQUENCE_LENGTH tokens of each sequence."""
        tokens, lengths = tensors["TOKENS_BATCH"], tensors["SEQUENCE_LENGTH"]
        if tokens.ndim != 3 or lengths.shape != tokens.shape[:2]:
            raise RequestError(
                f"TOKENS_BATCH has shape {list(tokens.shape)} and SEQUENCE_LENGTH {list(lengths.shape)}; give "
                "[batch, beams, tokens] and [batch, beams]"
            )
        texts = [
            self._text(ids, int(length))
            for row, counts in zip(tokens, lengths, strict=True)
            for ids, length in zip(row, counts, strict=True)
        ]
        return {"OUTPUT": np.array(texts, np.object_)}

    def _text(self, ids: NDArray[np.int32], length: int) -> bytes:
        if not 0 <= length <= len(ids):
            raise RequestError(f"SEQUENCE_LENGTH is {length} for {len(ids)} tokens")
        wanted = ids[:length].tolist()
        for token_id in wanted:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"TOKENS_BATCH holds token id {token_id}; ids must be in 0..{self.vocab_size - 1}")
        return self.decode(wanted).encode()
