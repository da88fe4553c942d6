"""Requests as they come: fields split into those of the call and those of sampling; nothing is ignored."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from magicdec.runtime.openai.errors import ApiError
from magicdec.runtime.openai.requests.unsupported import UNSUPPORTED
from magicdec.runtime.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 128
# Entries of a field; each entry takes time at every step, which all requests of the batch would pay for.
MAX_ENTRIES = {"stop": 64, "stop_token_ids": 256, "bad_words": 256, "logit_bias": 4096}
COMPLETION_TOKENS = 16  # of /v1/completions, when nothing is said, as OpenAI has it

_SAMPLING = SamplingParams.model_fields.keys() - {"logprobs"}  # which has another meaning in each endpoint
_MENDS = {
    "echo": "give true or false",
    "include_usage": "give true or false",
    "magicdec_details": "give true or false",
    "model": "give the name that /v1/models lists",
    "stream": "give true or false",
    "stream_options": 'give {"include_usage": true} or leave it out',
    "user": "give a string",
}


class StreamOptions(BaseModel):
    """What a stream holds besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that both endpoints have.

    Attributes:
        sampling: the fields of SamplingParams as they were given; it checks them itself.
        user: appears in the server's log.
        magicdec_details: choices (or chunks) tell what speculation did for them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    sampling: dict[str, Any]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    magicdec_details: bool = False

    def sampling_params(self, **defaults: Any) -> SamplingParams:
        """What the client asked for; `defaults` are for what it left open."""
        return SamplingParams(**{**defaults, **self.sampling})


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Any  # looked at by `prompts`
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Any  # looked at by `messages`
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """The likeliest tokens to tell beside the chosen one; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


T = TypeVar("T", bound=GenerationRequest)


def parse(kind: type[T], body: Any) -> T:
    """A request from its JSON; null is the same as leaving a field out.

    Raises:
        ApiError: 400, with the field's name and the mend.
        RequestError: from SamplingParams, for a field that nobody knows.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body is not a JSON object; send one with the fields of the request")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(given)
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    _check_sizes(sampling)
    _add_completion_tokens(sampling, given)
    _check_names(kind, given)
    try:
        request = kind(sampling=sampling, **given)
    except ValidationError as error:
        raise _api_error(error) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return request


def check_num_choices(num_prompts: int, n: int) -> None:
    """A call makes a bounded number of sequences."""
    if num_prompts * n > MAX_CHOICES:
        raise ApiError(
            400,
            f"{num_prompts} prompt(s) with n={n} make {num_prompts * n} choices; ask for at most {MAX_CHOICES} in one "
            "request",
            param="n",
        )


def _refuse_unsupported(given: dict[str, Any]) -> None:
    """Those that ask for nothing are taken out."""
    for name in UNSUPPORTED.keys() & given.keys():
        value, refusal = given.pop(name), UNSUPPORTED[name]
        if not any(_same(value, neutral) for neutral in refusal.neutral):
            raise ApiError(400, f"{name} is not supported: {refusal.mend}", param=name, code="unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0, and not true."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _check_sizes(sampling: dict[str, Any]) -> None:
    for name, most in MAX_ENTRIES.items():
        value = sampling.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise ApiError(400, f"{name} has {len(value)} entries; give at most {most}", param=name)


def _add_completion_tokens(sampling: dict[str, Any], given: dict[str, Any]) -> None:
    """max_completion_tokens is OpenAI's newer name of max_tokens."""
    if "max_completion_tokens" not in given:
        return
    value = given.pop("max_completion_tokens")
    if sampling.setdefault("max_tokens", value) != value:
        raise ApiError(
            400,
            f"max_tokens is {sampling['max_tokens']} and max_completion_tokens {value}: give one of them",
            param="max_completion_tokens",
        )


def _check_names(kind: type[GenerationRequest], given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name == "sampling" or name not in kind.model_fields:
            SamplingParams(**{name: value})  # which knows the names of other engines, and refuses all
            raise AssertionError(f"{name} is a sampling parameter and was not taken as one")
    for name, field in kind.model_fields.items():
        if field.is_required() and name not in given and name != "sampling":
            raise ApiError(400, f"{name} is missing; give it", param=name, code="missing_required_parameter")


def _api_error(error: ValidationError) -> ApiError:
    detail = error.errors()[0]
    names = [str(part) for part in detail["loc"]]
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    mend = _MENDS.get(names[-1]) or _MENDS.get(names[0])
    return ApiError(
        400, f"{'.'.join(names)} is {detail['input']!r}: {reason}{f'; {mend}' if mend else ''}", param=names[0]
    )
