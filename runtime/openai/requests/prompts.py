"""The prompts of a request: text, token ids, lists of either, or a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.runtime.openai.errors import ApiError
from magicdec.runtime.text.tokenizer import HFTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = {"role", "content"}


@dataclass(frozen=True)
class Prompt:
    """What the engine reads, and the text that it was made of, if it was."""

    token_ids: list[int]
    text: str | None


def completion_prompts(value: Any, tokenizer: HFTokenizer) -> list[Prompt]:
    """The prompts in a string, a list of strings, a list of token ids, or a list of lists of them."""
    if isinstance(value, str):
        return [_from_text(value, tokenizer)]
    if _are_ids(value):
        return [Prompt(value, None)]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_from_text(item, tokenizer) for item in value]
        if all(_are_ids(item) for item in value):
            return [Prompt(item, None) for item in value]
    raise ApiError(
        400,
        "prompt is none of these: a string, a list of strings, a list of token ids, a list of lists of token ids; "
        "none of the lists empty",
        param="prompt",
    )


def chat_messages(value: Any) -> list[dict[str, str]]:
    """Messages for a chat template: role and text."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages is not a list of at least one message", param="messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ApiError(400, f'{name} is not an object; give {{"role": ..., "content": ...}}', param=name)
    given = {field: entry for field, entry in value.items() if entry is not None and entry != []}
    for field in given.keys() - _MESSAGE_FIELDS:
        raise ApiError(
            400,
            f"{name}.{field} is not supported: a message has role and content; put the rest into content",
            param=f"{name}.{field}",
            code="unsupported_parameter",
        )
    role = given.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{name}.role is {role!r}: give one of {', '.join(ROLES)}", param=f"{name}.role")
    role = "system" if role == "developer" else role  # OpenAI's newer name, which no template knows
    return {"role": role, "content": _content(given.get("content"), f"{name}.content")}


def _content(value: Any, name: str) -> str:
    """Text, or parts that all are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, f"{name} is {'missing' if value is None else 'no text'}: give a string", param=name)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f'{name}[{index}] is a part of type {kind!r}: only {{"type": "text", "text": ...}} is supported',
                param=f"{name}[{index}]",
            )
        texts.append(part["text"])
    return "".join(texts)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _from_text(text: str, tokenizer: HFTokenizer) -> Prompt:
    return Prompt(tokenizer.encode(text), text)


def check_lengths(prompts: Sequence[Prompt], limit: int) -> None:
    """ApiError for a prompt of more than `limit` tokens."""
    for index, prompt in enumerate(prompts):
        if len(prompt.token_ids) > limit:
            raise ApiError(
                400,
                f"prompt {index} has {len(prompt.token_ids)} tokens, and this server takes at most {limit}; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
