"""The bytes that a single token stands for, also where they are only a part of a character."""

import json
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"  # SentencePiece's spelling of a space


def token_bytes(raw: Any) -> Callable[[int], bytes]:
    """A function from token id to bytes, for a tokenizer of the tokenizers library; special tokens spell their name.

    An id without a token has no bytes.
    """
    literal = {token_id: token.content for token_id, token in raw.get_added_tokens_decoder().items()}
    spell = _byte_level if "ByteLevel" in _decoders(json.loads(raw.to_str()).get("decoder")) else _sentence_piece

    def bytes_of(token_id: int) -> bytes:
        if token_id in literal:
            return str(literal[token_id]).encode()
        piece = raw.id_to_token(token_id)
        return b"" if piece is None else spell(piece)

    return bytes_of


def _decoders(decoder: dict[str, Any] | None) -> set[str]:
    """Types of a decoder and of those inside it."""
    if decoder is None:
        return set()
    inner = (_decoders(each) for each in decoder.get("decoders", ()))
    return {str(decoder["type"])}.union(*inner)


def _byte_level(piece: str) -> bytes:
    return b"".join(_BYTES.get(char, char.encode()) for char in piece)


def _sentence_piece(piece: str) -> bytes:
    single = _BYTE.fullmatch(piece)
    return bytes([int(single[1], 16)]) if single else piece.replace(_WORD_START, " ").encode()


def _spelled_bytes() -> dict[str, bytes]:
    """Byte-level BPE spells printable bytes as they are, the others as U+0100 and on, in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + i): bytes([byte]) for i, byte in enumerate(hidden)
    }


_BYTES = _spelled_bytes()
