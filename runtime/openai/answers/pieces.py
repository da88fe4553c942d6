"""What is new in the cumulative outputs of a stream."""

from dataclasses import dataclass

from magicdec.runtime.outputs import CompletionOutput, FinishReason, Logprob, TokenOrigin


@dataclass(frozen=True)
class Piece:
    """The next part of a choice, or all of it. first: nothing came before; offset: characters that came before."""

    index: int
    text: str
    first: bool
    offset: int
    token_ids: list[int]
    token_origins: list[TokenOrigin]
    token_lengths: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None


class PieceReader:
    """One choice of a response. prefix: text that comes before the output (the prompt, with `echo`)."""

    def __init__(self, index: int, prefix: str = "") -> None:
        self.index = index
        self._prefix = prefix
        self._num_chars = self._num_tokens = self._num_decoded = 0
        self._first, self._finished = True, False

    def read(self, output: CompletionOutput) -> Piece | None:
        """What came since the last piece; None while no text did. Tokens wait for the text that they end up in."""
        text = output.text[self._num_chars :]
        if self._finished or not (text or output.finish_reason):
            return None
        start = self._num_tokens
        piece = Piece(
            index=self.index,
            text=self._prefix + text,
            first=self._first,
            offset=self._num_decoded,
            token_ids=output.token_ids[start:],
            token_origins=output.token_origins[start:],
            token_lengths=output.token_lengths[start:],
            logprobs=None if output.logprobs is None else output.logprobs[start:],
            finish_reason=output.finish_reason,
        )
        self._prefix, self._first, self._finished = "", False, output.finish_reason is not None
        self._num_chars, self._num_tokens = len(output.text), len(output.token_ids)
        self._num_decoded += sum(piece.token_lengths)
        return piece
