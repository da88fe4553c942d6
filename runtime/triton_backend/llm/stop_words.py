"""Stop words that came as tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magicdec.errors import RequestError


@dataclass(frozen=True)
class StopWords:
    """Words that are found in the text, however it is cut into tokens, and special tokens, which have no text."""

    texts: list[str]
    token_ids: list[int]

    @classmethod
    def of(cls, words: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]) -> "StopWords":
        """RequestError where a word is several tokens that are no text together."""
        texts, token_ids = [], []
        for word in words:
            text = decode(word)
            if text and "�" not in text:
                texts.append(text)
            elif len(word) == 1:
                token_ids.append(word[0])
            else:
                raise RequestError(
                    f"stop_words_list holds the word {list(word)}, which is no text; give words of whole characters, "
                    "and special tokens one by one"
                )
        return cls(texts, token_ids)
