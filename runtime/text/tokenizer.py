"""The engine directory's tokenizer: encode, decode as a stream, and the chat template."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from magicdec.errors import EngineError, RequestError
from magicdec.runtime.text.token_bytes import token_bytes


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        ...

    def decode_stream(self) -> Callable[[int], str | None]:
        """A new incremental decoder: takes one id, returns the text that became certain."""
        ...


class HFTokenizer:
    """`tokenizer.json` and the chat template, by transformers and its tokenizers library."""

    def __init__(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        if not (directory / "tokenizer.json").is_file():
            raise EngineError(f"{directory} holds no tokenizer.json; build the pair from a checkpoint that has one")
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory)
        except Exception as error:  # the libraries raise many kinds, down to bare Exception
            raise EngineError(f"the tokenizer in {directory} cannot be loaded: {error}; build it again") from error
        self._raw: Any = self._tokenizer.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a prompt."""
        return self._ids(text, special=True)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids without special tokens around them."""
        return self._ids(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._raw.decode(list(token_ids), skip_special_tokens=True))

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes that one token stands for."""
        return token_bytes(self._raw)

    def decode_stream(self) -> Callable[[int], str | None]:
        """Text by whole characters; special tokens are left out."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(self._raw, token_id)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of a conversation, ready for the answer."""
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template; give the prompt as plain text")
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except TemplateError as error:  # e.g. roles that do not alternate
            raise RequestError(f"this model's chat template refuses the conversation: {error}; change it") from error

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation; the template writes the special tokens itself."""
        return self.encode_plain(self.chat_prompt(messages))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self._raw.encode(text, add_special_tokens=special).ids)
