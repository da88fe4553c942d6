"""The bytes of single tokens: together they are the text's, whatever the tokenizer's spelling."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from magicdec.runtime.text.token_bytes import token_bytes
from tests.support.tiny_models import BOS_ID, write_tiny_tokenizer

TEXT = "The king's name \u2014 \u00e9t\u00e9, \U0001f600\n\tis \x00 0x0A."


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory, 300)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=st.text())
def test_byte_level(byte_level: Any, text: str) -> None:
    bytes_of = token_bytes(byte_level)
    ids = byte_level.encode(text, add_special_tokens=False).ids
    special = {token.content for token in byte_level.get_added_tokens_decoder().values()}
    if not any(name in text for name in special):
        assert b"".join(map(bytes_of, ids)) == text.encode()


def test_special_and_absent_tokens(byte_level: Any) -> None:
    bytes_of = token_bytes(byte_level)
    assert bytes_of(BOS_ID) == b"<s>"
    assert bytes_of(100_000) == b""


def test_sentence_piece(tmp_path: Path) -> None:
    """As LLaMA 2 has it: words begin with U+2581, and bytes that have no token are spelled <0xNN>."""
    words = ["<unk>", "\u2581The", "\u2581king", *(f"<0x{byte:02X}>" for byte in range(256))]
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {word: index for index, word in enumerate(words)},
            "merges": [],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bytes_of = token_bytes(raw)
    ids = [1, 2, *(3 + byte for byte in TEXT.encode())]
    assert b"".join(map(bytes_of, ids)) == f" The king{TEXT}".encode()
    assert raw.decode(ids) == f" The king{TEXT}"
