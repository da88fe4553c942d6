"""Values of options that are more than a word or a number; read when this process is known to be the one to ask."""

from collections.abc import Sequence
from typing import Literal

from magicdec.errors import RequestError


def draft_length(text: str | None) -> int | Literal["auto"] | None:
    """The value of --num-draft-tokens."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise RequestError(f"--num-draft-tokens {text!r} is not a whole number; give 0, 1, 2, ... or auto")
    return int(text)


def parse_logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """`["5=-2.5"]` -> {5: -2.5}; RequestError names the entry that is none."""
    biases = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {entry!r} is not ID=VALUE; write for example 42=-1.5") from None
    return biases
