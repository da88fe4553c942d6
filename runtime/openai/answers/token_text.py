"""Single tokens as log-probabilities name them: text, and the bytes that it stands for."""

from functools import lru_cache

from magicdec.runtime.text.tokenizer import HFTokenizer


class TokenText:
    """Spells the tokens of a tokenizer."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.bytes_of = lru_cache(maxsize=65536)(tokenizer.token_bytes)

    def text_of(self, token_id: int) -> str:
        """The token's text; bytes that are only a part of a character as `bytes:\\xe2\\x82`, as OpenAI spells them."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
