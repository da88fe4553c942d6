"""What a request may ask of an engine; refused at the door, before anything is changed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magicdec.errors import RequestError
from magicdec.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class CheckedRequest:
    """What is asked for. prompt: the text that the token ids stand for, if it was text."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None = None


def check_request(
    request: CheckedRequest,
    *,
    vocab_size: int,
    max_seq_len: int,
    max_draft_len: int,
    max_kv_tokens: int,
    has_tokenizer: bool,
) -> CheckedRequest:
    """The request; RequestError, with the mend, if an engine of these limits cannot serve it."""
    params, length = request.params, len(request.prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt is empty; give at least one token")
    if length >= max_seq_len:
        raise RequestError(
            f"the prompt has {length} tokens, and max_seq_len={max_seq_len} leaves no room for an output "
            f"token; shorten it to at most {max_seq_len - 1} or build the engine with a larger max_seq_len"
        )
    check_token_ids("the prompt", request.prompt_token_ids, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    if (params.num_draft_tokens or 0) > max_draft_len:
        raise RequestError(
            f"num_draft_tokens={params.num_draft_tokens} is more than this engine's max_draft_len="
            f"{max_draft_len}; ask for at most {max_draft_len}, or build with a larger max_draft_len"
        )
    if (params.stop or params.bad_words) and not has_tokenizer:
        raise RequestError("stop strings and bad_words need a tokenizer, and this engine has none; use token ids")
    total = min(length + params.max_tokens, max_seq_len)
    if total > max_kv_tokens:
        raise RequestError(
            f"the request may grow to {total} tokens, and the KV cache holds "
            f"{max_kv_tokens} in all; lower max_tokens or give the engine a "
            "larger KV cache"
        )
    return request


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """RequestError for an id that the model does not have; nothing behind this door looks again."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name} holds token id {token_id}; ids must be in 0..{vocab_size - 1}")


def id_in_use(request_id: str) -> RequestError:
    """The error of a second request with the id of one that is open."""
    return RequestError(f"request id {request_id!r} is in use; choose another or abort that request first")
