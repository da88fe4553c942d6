"""The two shapes of an answer: a completion's and a conversation's."""

from typing import Any, Protocol

from magicdec.runtime.openai.answers.logprobs import chat_logprobs, completion_logprobs
from magicdec.runtime.openai.answers.pieces import Piece
from magicdec.runtime.openai.answers.token_text import TokenText


class Format(Protocol):
    """How a choice is written. whole, part: the `object` of an answer and of a chunk."""

    whole: str
    part: str

    def choice(self, piece: Piece) -> dict[str, Any]:
        """All of a choice."""
        ...

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A part of a choice, in a chunk."""
        ...


class CompletionFormat:
    """The shape of /v1/completions: a part looks like the whole."""

    whole = part = "text_completion"

    def __init__(self, texts: TokenText) -> None:
        self._texts = texts

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice with its text."""
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece, self._texts),
            "finish_reason": piece.finish_reason,
        }

    delta = choice


class ChatFormat:
    """The shape of /v1/chat/completions. num_top: how many likeliest tokens the log-probabilities name."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenText, num_top: int) -> None:
        self._texts, self._num_top = texts, num_top

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice with its message."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """The first one names the role."""
        delta = {"role": "assistant"} if piece.first else {}
        return {"index": piece.index, "delta": {**delta, "content": piece.text}, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        return {
            "logprobs": chat_logprobs(piece, self._texts, self._num_top),
            "finish_reason": piece.finish_reason,
        }
