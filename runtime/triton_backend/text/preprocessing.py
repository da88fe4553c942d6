"""Text to token ids: what the model `preprocessing` computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicdec.errors import RequestError
from magicdec.runtime.triton_backend.word_lists import pack_words

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Preprocessor:
    """encode: a prompt's ids, encode_plain: those of a piece of text. end_id: the model's own, -1 for none."""

    encode: Callable[[str], list[int]]
    encode_plain: Callable[[str], list[int]]
    vocab_size: int
    end_id: int

    def __call__(self, tensors: Tensors) -> dict[str, NDArray[Any]]:
        """All outputs for a batch; prompts are padded with the padding id."""
        for name in ("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID"):
            if name in tensors:
                raise RequestError(f"input {name} is not supported; leave it out")
        queries = _texts("QUERY", tensors["QUERY"])
        size = len(queries)
        prompts = [self._prompt(texts) for texts in queries]
        end_id = tensors.get("END_ID", np.full((size, 1), self.end_id, np.int32))
        pad_id = tensors.get("PAD_ID", end_id)
        ids = np.repeat(pad_id.reshape(size, 1).astype(np.int32), max(map(len, prompts)), axis=1)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "BAD_WORDS_IDS": self._words(tensors, "BAD_WORDS_DICT", size),
            "STOP_WORDS_IDS": self._words(tensors, "STOP_WORDS_DICT", size),
            "EMBEDDING_BIAS": self._bias(tensors, size),
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"].astype(np.int32),
            "OUT_END_ID": end_id.astype(np.int32),
            "OUT_PAD_ID": pad_id.astype(np.int32),
        }

    def _prompt(self, texts: Sequence[str]) -> list[int]:
        if len(texts) != 1:
            raise RequestError(f"QUERY has {len(texts)} texts for one request; give one")
        ids = self.encode(texts[0])
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        return ids

    def _words(self, tensors: Tensors, name: str, size: int) -> NDArray[np.int32]:
        batch = _texts(name, tensors[name]) if name in tensors else [[]] * size
        return pack_words([[ids for word in words if (ids := self.encode_plain(word))] for words in batch])

    def _bias(self, tensors: Tensors, size: int) -> NDArray[np.float32]:
        """[B, vocab_size], or [B, 0] where none is asked for: the weight of a word on each of its tokens."""
        names = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
        if not any(name in tensors for name in names):
            return np.zeros((size, 0), np.float32)
        if not all(name in tensors for name in names) or tensors[names[0]].shape != tensors[names[1]].shape:
            raise RequestError("EMBEDDING_BIAS_WORDS and EMBEDDING_BIAS_WEIGHTS must have the same shape; give both")
        bias = np.zeros((size, self.vocab_size), np.float32)
        for row, words, weights in zip(bias, _texts(names[0], tensors[names[0]]), tensors[names[1]], strict=True):
            for word, weight in zip(words, weights, strict=True):
                np.add.at(row, self.encode_plain(word), weight)
        return bias


def _texts(name: str, tensor: NDArray[Any]) -> list[list[str]]:
    """The strings [B][N] of a tensor of bytes."""
    try:
        return [[text.decode() for text in row.ravel()] for row in tensor]
    except UnicodeDecodeError as error:
        raise RequestError(f"input {name} is not UTF-8 text ({error})") from error
