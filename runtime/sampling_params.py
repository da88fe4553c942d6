"""What a request asks of its output. All of it is exact under speculation; what is not supported is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from magicdec.errors import RequestError

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below it a float32 logit difference divided by the temperature says no more than arg-max does
MAX_LOGIT_BIAS = 1e9

_TokenId = Annotated[int, Field(ge=0)]
_BiasTokenId = Annotated[int, Field(ge=0), Strict(False)]  # JSON has only string keys
_Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
_NonEmptyStr = Annotated[str, Field(min_length=1)]

# Names that users of vLLM, TensorRT-LLM and the OpenAI API know, and what to do instead.
_UNSUPPORTED = {
    "allowed_token_ids": "use bad_words or logit_bias",
    "beam_width": "use n with temperature > 0",
    "best_of": "use n and choose among the outputs",
    "detokenize": "read token_ids and ignore text",
    "early_stopping": "it belongs to beam search, which is not supported",
    "embedding_bias": "use logit_bias",
    "end_id": "use stop_token_ids",
    "guided_decoding": "constrained output is not supported",
    "include_stop_str_in_output": "a stop string is always cut off",
    "length_penalty": "it belongs to beam search, which is not supported",
    "logits_processor": "use logit_bias, bad_words or the penalties",
    "logits_processors": "use logit_bias, bad_words or the penalties",
    "max_new_tokens": "use max_tokens",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "prompt_logprobs": "only logprobs of output tokens are supported",
    "random_seed": "use seed",
    "response_format": "constrained output is not supported",
    "skip_special_tokens": "special tokens are always left out of the text",
    "spaces_between_special_tokens": "special tokens are always left out of the text",
    "structured_outputs": "constrained output is not supported",
    "truncate_prompt_tokens": "shorten the prompt before the call",
    "use_beam_search": "use n with temperature > 0",
}

_MENDS = {
    "temperature": f"give 0 for greedy decoding, or a number from {MIN_TEMPERATURE:g} to 1e6",
    "top_k": "give 1 or more, or 0 (or -1) to switch it off",
    "top_p": "give a number above 0 and at most 1 (1 switches it off)",
    "min_p": "give a number from 0 (off) to 1",
    "repetition_penalty": "give a number above 0 (1 switches it off)",
    "presence_penalty": "give a number from -2 to 2 (0 switches it off)",
    "frequency_penalty": "give a number from -2 to 2 (0 switches it off)",
    "logit_bias": f"give a mapping of token ids to numbers within +-{MAX_LOGIT_BIAS:g}; to forbid a text use bad_words",
    "bad_words": "give a list of strings that are not empty",
    "stop": "give a string or a list of strings, none of them empty",
    "stop_token_ids": "give a list of token ids, 0 or more each",
    "min_tokens": "give 0 or more, and at most max_tokens",
    "max_tokens": "give 1 or more",
    "ignore_eos": "give True or False",
    "seed": "give a whole number from 0 to 2**64 - 1, or None for a fresh one",
    "n": "give 1 or more",
    "logprobs": f"give a whole number from 0 to {MAX_LOGPROBS}, or None for none",
    "acceptance": "give 'rejection', 'coupled', or None to choose by whether a seed is given",
    "num_draft_tokens": "give 0 (plain decoding) or more, or None for the engine's own",
}


class SamplingParams(BaseModel):
    """How to draw the tokens of one request, and when to stop; the names are those of vLLM.

    Attributes:
        temperature: divides the logits; 0 is greedy (arg-max of the processed logits, the lowest id of equals).
        top_k: keep the `top_k` most likely tokens (and those exactly as likely as the last of them); 0 or -1 is off.
        top_p: keep the smallest set of most likely tokens with at least this much probability (and exact equals).
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output.
        presence_penalty: taken from the logit of each token that is in the output.
        frequency_penalty: taken from the logit of a token for each time that it is in the output.
        logit_bias: added to the logits of these token ids.
        bad_words: strings that the output never completes.
        stop: strings that end the output and are cut off it.
        stop_token_ids: token ids that end the output, beside the model's own end-of-sequence ids.
        min_tokens: no end-of-sequence or stop token id before this many output tokens.
        max_tokens: the output has at most this many tokens.
        ignore_eos: go on after an end-of-sequence token.
        seed: makes the output repeatable (and by default `acceptance` "coupled").
        n: number of outputs for the prompt, each with its own randomness.
        logprobs: give the log-probability of each output token and of this many most likely ones.
        acceptance: rule by which draft tokens are accepted; both leave the distribution of the output untouched.
        num_draft_tokens: at most this many draft tokens a round; 0 is plain decoding.

    Raises:
        RequestError: a value is out of range or not finite, or a name is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = Field(default=1.0, ge=0, le=1e6)
    top_k: int = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[_BiasTokenId, _Bias] | None = None
    bad_words: list[_NonEmptyStr] = Field(default_factory=list)
    stop: list[_NonEmptyStr] = Field(default_factory=list)
    stop_token_ids: list[_TokenId] = Field(default_factory=list)
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int = Field(default=16, ge=1)
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    n: int = Field(default=1, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    acceptance: Literal["rejection", "coupled"] | None = None
    num_draft_tokens: int | None = Field(default=None, ge=0)

    if not TYPE_CHECKING:  # a type checker keeps the signature made from the fields

        def __init__(self, **data: Any) -> None:
            _refuse_unsupported(data)
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _request_error(error) from None

        @classmethod
        def model_validate(cls, obj: Any, **_: Any) -> SamplingParams:
            """`SamplingParams(**obj)`, so that both ways in raise the same errors."""
            if isinstance(obj, cls):
                return obj
            if not isinstance(obj, Mapping):
                raise RequestError(f"sampling parameters are {obj!r}: give a mapping of names to values")
            return cls(**obj)

    @property
    def greedy(self) -> bool:
        """Whether the arg-max is taken; the random draws then decide nothing."""
        return self.temperature == 0

    @property
    def acceptance_rule(self) -> Literal["rejection", "coupled"]:
        """`acceptance`, resolved: a request with a seed wants the very output of plain decoding.

        Greedy: both rules coincide, and this one needs no noise over the vocabulary.
        """
        if self.greedy:
            return "rejection"
        return self.acceptance or ("rejection" if self.seed is None else "coupled")

    @field_validator("stop", "bad_words", "stop_token_ids", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else list(value) if isinstance(value, (tuple, set)) else value

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens})")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}, too small to divide by: {_MENDS['temperature']}")
        return self


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    for name in data:
        if name in _UNSUPPORTED:
            mend = _UNSUPPORTED[name]
            raise RequestError(f"sampling parameter {name} (given {data[name]!r}) is not supported: {mend}")


def _request_error(error: ValidationError) -> RequestError:
    """The first thing wrong, as `field is value: reason; mend`, and how many more there are."""
    errors = error.errors()
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return RequestError(f"{_describe(errors[0])}{more}")


def _describe(detail: ErrorDetails) -> str:
    reason = detail["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if not detail["loc"]:  # a check across fields names them itself
        return reason
    field = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"sampling parameter {field} (given {detail['input']!r}) is unknown: check the spelling"
    path = "".join(f"[{part}]" for part in detail["loc"][1:] if part != "[key]")
    return f"sampling parameter {field}{path} is {detail['input']!r}: {reason}; {_MENDS[field]}"
