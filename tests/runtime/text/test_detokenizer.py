"""Text as it comes: whole characters, stop strings across tokens, and nothing shown that a stop string may yet cut."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magicdec.runtime.text.detokenizer import REPLACEMENT, Detokenizer
from magicdec.runtime.text.tokenizer import HFTokenizer
from tests.support.tiny_models import EOS_ID, write_tiny_tokenizer

VOCAB_SIZE = 276  # 5 special tokens and all 256 bytes, with some merges


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """Byte-level BPE: characters beyond ASCII are split across tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory, VOCAB_SIZE)
    return HFTokenizer(directory)


def _pieces(*pieces: str) -> Callable[[], Callable[[int], str | None]]:
    """A decoder whose token i is piece i."""
    return lambda: lambda token_id: pieces[token_id] or None


def _feed(detokenizer: Detokenizer, token_ids: Sequence[int], min_tokens: int = 0) -> tuple[list[str], str | None, int]:
    """(text after each token, the stop string, tokens used), up to a stop string."""
    texts: list[str] = []
    for count, token_id in enumerate(token_ids, 1):
        stop = detokenizer.append(token_id, is_stop_token=False, may_stop=count >= min_tokens)
        texts.append(detokenizer.text)
        if stop is not None:
            return texts, stop, count
    return texts, None, len(token_ids)


@given(text=st.text(max_size=30))
@example(text="naïve 你好 👩‍👩‍👧 ok")
def test_any_text_survives_and_only_whole_characters_show(tokenizer: HFTokenizer, text: str) -> None:
    """UTF-8 split across tokens: each snapshot is a beginning of the text, and the last is all of it."""
    detokenizer = Detokenizer(tokenizer.decode_stream, [])
    texts, _, _ = _feed(detokenizer, tokenizer.encode_plain(text))
    assert all(text.startswith(shown) and REPLACEMENT not in shown.removesuffix(text) for shown in texts)
    detokenizer.finish()
    assert detokenizer.text == text


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_tokens_decode(tokenizer: HFTokenizer, token_ids: list[int]) -> None:
    """Also bytes that are no text, as a model may write; what shows is a beginning of the whole decoded at once."""
    detokenizer = Detokenizer(tokenizer.decode_stream, [])
    texts, _, _ = _feed(detokenizer, token_ids)
    assert all(tokenizer.decode(token_ids).startswith(shown) for shown in texts)
    assert [sum(detokenizer.lengths[: index + 1]) for index in range(len(texts))] == [len(shown) for shown in texts]


def test_special_tokens_have_no_text(tokenizer: HFTokenizer) -> None:
    """Also when they are no end (ignore_eos)."""
    detokenizer = Detokenizer(tokenizer.decode_stream, [])
    _feed(detokenizer, [*tokenizer.encode_plain("one"), EOS_ID, *tokenizer.encode_plain(" two")])
    assert detokenizer.text == "one two"


def test_bytes_that_are_no_character_do_not_stop_the_text() -> None:
    """A SentencePiece decoder with byte fallback raises when an invalid run of bytes changes what it decoded before."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁a": 257}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    def decode_stream() -> Callable[[int], str | None]:
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(raw, token_id)

    valid, broken = [1 + byte for byte in "你".encode()], 1 + 0xBD
    step = decode_stream()
    with pytest.raises(Exception, match="Invalid prefix"):  # the library's fault that is dealt with
        _ = [step(token_id) for token_id in [*valid, broken, 257]]
    detokenizer = Detokenizer(decode_stream, [])
    texts, _, _ = _feed(detokenizer, [257, *valid, broken, 257, 257])
    assert texts == [" a", " a", " a", " a你", " a你", f" a你{REPLACEMENT} a", f" a你{REPLACEMENT} a a"]


def test_stop_string_across_tokens_is_cut() -> None:
    """The token that completes it ends the text before its beginning."""
    detokenizer = Detokenizer(_pieces("one ", "ST", "O", "P two"), ["STOP"])
    texts, stop, used = _feed(detokenizer, [0, 1, 2, 3])
    assert (texts, stop, used) == (["one ", "one ", "one ", "one "], "STOP", 4)
    assert detokenizer.lengths == [4, 2, 1, 5]
    detokenizer.finish()
    assert detokenizer.text == "one "


def test_held_back_text_is_released_when_it_is_no_stop_string_or_at_the_end() -> None:
    """What could begin a stop string waits for the next token, or for the end of the output."""
    detokenizer = Detokenizer(_pieces("a", "<", "|", "b"), ["<|end|>"])
    texts, stop, _ = _feed(detokenizer, [0, 1, 2, 3, 1])
    assert (texts, stop) == (["a", "a", "a", "a<|b", "a<|b"], None)
    assert detokenizer.lengths == [1, 1, 1, 1, 1]
    detokenizer.finish()
    assert detokenizer.text == "a<|b<"


def test_of_two_stop_strings_in_one_token_the_first_wins() -> None:
    """And of two that begin together the shorter, which is complete first."""
    assert _feed(Detokenizer(_pieces("xaabb"), ["bb", "aa"]), [0]) == ([""], "aa", 1)
    assert _feed(Detokenizer(_pieces("xaab"), ["aab", "aa"]), [0]) == ([""], "aa", 1)


def test_stop_strings_do_not_reach_before_min_tokens() -> None:
    """Text of the first min_tokens - 1 tokens is out already; a stop string may begin with the token after them."""
    pieces = _pieces("aa", "a")
    assert _feed(Detokenizer(pieces, ["aa"]), [0, 0, 1, 1], min_tokens=3) == (["aa", "aaaa", "aaaa", "aaaa"], "aa", 4)
    assert _feed(Detokenizer(pieces, ["aa"]), [1, 0], min_tokens=2) == (["a", "a"], "aa", 2)


def test_stop_token_has_no_text_where_it_ends_the_output() -> None:
    """Before min_tokens it is a token like any other."""
    detokenizer = Detokenizer(_pieces("a", "."), [])
    assert detokenizer.append(1, is_stop_token=True, may_stop=False) is None
    assert detokenizer.append(1, is_stop_token=True, may_stop=True) is None
    assert (detokenizer.text, detokenizer.lengths) == (".", [1, 0])


def test_without_a_tokenizer_there_is_no_text() -> None:
    """Token ids alone."""
    detokenizer = Detokenizer(None, [])
    assert _feed(detokenizer, [1, 2]) == (["", ""], None, 2)
    assert detokenizer.lengths == [0, 0]


@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=4),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    token_ids=st.lists(st.integers(0, 3), max_size=12),
    min_tokens=st.integers(0, 4),
)
def test_same_as_searching_the_whole_text_after_every_token(
    pieces: list[str], stops: list[str], token_ids: list[int], min_tokens: int
) -> None:
    """Against the naive search, and never a character shown that goes away again."""
    token_ids = [token_id % len(pieces) for token_id in token_ids]
    detokenizer = Detokenizer(_pieces(*pieces), stops)
    texts, stop, used = _feed(detokenizer, token_ids, min_tokens)
    detokenizer.finish()
    assert (detokenizer.text, stop, used) == _naive(pieces, stops, token_ids, min_tokens)
    for shown in texts:
        assert detokenizer.text.startswith(shown)


def _naive(
    pieces: Sequence[str], stops: Sequence[str], token_ids: Sequence[int], min_tokens: int
) -> tuple[str, str | None, int]:
    text, first = "", 0
    for count, token_id in enumerate(token_ids, 1):
        text += pieces[token_id]
        if count < min_tokens:
            first = len(text)
            continue
        hits = [(text.index(stop, first), stop) for stop in stops if stop in text[first:]]
        if hits:
            start, stop = min(hits)
            return text[:start], stop, count
    return text, None, len(token_ids)
