"""Lists of words as tokens, in the TensorRT-LLM backend's form [2, N].

Row 0: the tokens of all words end to end. Row 1: where each word ends, padded with -1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from magicdec.errors import RequestError

Words = Sequence[Sequence[int]]


def pack_words(batch: Sequence[Words]) -> NDArray[np.int32]:
    """[B, 2, N] of the words of each request of a batch; N is 0 when there are none."""
    size = max((sum(map(len, words)) for words in batch), default=0)
    packed = np.zeros((len(batch), 2, size), np.int32)
    packed[:, 1] = -1
    for row, words in zip(packed, batch, strict=True):
        tokens = [token for word in words for token in word]
        row[0, : len(tokens)] = tokens
        row[1, : len(words)] = np.cumsum([len(word) for word in words])
    return packed


def unpack_words(name: str, packed: NDArray[np.int32]) -> list[list[int]]:
    """The words of [2, N]; RequestError, naming the input, where offsets do not rise or point past the tokens."""
    if packed.ndim != 2 or packed.shape[0] != 2:
        raise RequestError(f"{name} has shape {list(packed.shape)}; give [2, N]: tokens of all words, and their ends")
    tokens, ends = packed[0].tolist(), [end for end in packed[1].tolist() if end != -1]
    words, start = [], 0
    for end in ends:
        if not start < end <= len(tokens):
            raise RequestError(
                f"{name} has the ends {ends} for {len(tokens)} tokens; they must rise from 1 on, padded with -1"
            )
        words.append(tokens[start:end])
        start = end
    return words
