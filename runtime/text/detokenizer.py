"""Tokens to text as they come: whole characters only, and stop strings held back until they are decided."""

from collections.abc import Callable, Sequence

# Takes the next token id; returns the text that became certain, or None while a character is incomplete.
DecodeStep = Callable[[int], str | None]
DecodeStream = Callable[[], DecodeStep]  # makes a new one, at the beginning of a text

REPLACEMENT = "\ufffd"  # what stands for bytes that are no character


class Detokenizer:
    """The text of one output. `text` never contains a part of a stop string that may yet complete."""

    def __init__(self, decode_stream: DecodeStream | None, stop: Sequence[str]) -> None:
        self._decode_stream = decode_stream
        self._decode_step = decode_stream() if decode_stream is not None else None
        self._stop = stop
        self._decoded = ""  # everything decoded, cut at a stop string
        self._num_released = 0  # characters of it that are certain to stay
        self.lengths: list[int] = []  # characters that each token added, also where a stop string cut them later

    @property
    def text(self) -> str:
        """The text that is certain."""
        return self._decoded[: self._num_released]

    def append(self, token_id: int, *, is_stop_token: bool, may_stop: bool) -> str | None:
        """Add a token; returns the stop string that it completes, if it may stop here.

        A stop token adds no text. Of several stop strings completed by the token, the one that starts first wins.
        """
        if self._decode_step is None:
            self.lengths.append(0)
            return None
        piece = "" if is_stop_token and may_stop else self._decode(token_id)
        self.lengths.append(len(piece))
        searched = len(self._decoded)
        self._decoded += piece
        if not may_stop:  # what stands before min_tokens can no longer be part of a stop string
            self._num_released = len(self._decoded)
            return None
        found = self._find_stop(searched)
        if found is None:
            self._num_released = max(self._num_released, len(self._decoded) - self._held_back())
            return None
        start, stop = found
        self._decoded = self._decoded[:start]
        return stop

    def finish(self) -> None:
        """Nothing more comes: release what was held back."""
        self._num_released = len(self._decoded)

    def _decode(self, token_id: int) -> str:
        """The next piece of text, whatever the tokens are: a model may write bytes that are no character."""
        assert self._decode_stream is not None
        assert self._decode_step is not None
        try:
            return self._decode_step(token_id) or ""
        except Exception:  # bare, from tokenizers: bytes that it held back changed the text before them
            self._decode_step = self._decode_stream()
            return REPLACEMENT + (self._decode_step(token_id) or "")

    def _find_stop(self, searched: int) -> tuple[int, str] | None:
        """The first stop string that ends within the text added since `searched`."""
        hits = []
        for stop in self._stop:
            start = self._decoded.find(stop, max(self._num_released, searched - len(stop) + 1))
            if start >= 0:
                hits.append((start, stop))
        return min(hits, default=None)

    def _held_back(self) -> int:
        """Length of the longest end of the text that could be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:length]):
                    longest = length
                    break
        return longest
