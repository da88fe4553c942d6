"""Log-probabilities in the shapes of the two endpoints."""

from typing import Any

from magicdec.runtime.openai.answers.pieces import Piece
from magicdec.runtime.openai.answers.token_text import TokenText
from magicdec.runtime.outputs import Logprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; vLLM's value


def completion_logprobs(piece: Piece, texts: TokenText) -> dict[str, Any] | None:
    """Parallel lists, one entry a token; None if they were not asked for. text_offset: in the output's characters."""
    if piece.logprobs is None:
        return None
    offsets, offset = [], piece.offset
    for length in piece.token_lengths:
        offsets.append(offset)
        offset += length
    rows = list(zip(piece.token_ids, piece.logprobs, strict=True))
    return {
        "tokens": [texts.text_of(token_id) for token_id in piece.token_ids],
        "token_logprobs": [_finite(row[token_id]) for token_id, row in rows],
        "top_logprobs": [{texts.text_of(other): _finite(entry) for other, entry in row.items()} for _, row in rows],
        "text_offset": offsets,
    }


def chat_logprobs(piece: Piece, texts: TokenText, num_top: int) -> dict[str, Any] | None:
    """An object a token; None if they were not asked for. num_top: how many of the likeliest to name."""
    if piece.logprobs is None:
        return None
    content = []
    for token_id, row in zip(piece.token_ids, piece.logprobs, strict=True):
        top = sorted((entry.rank, other) for other, entry in row.items())[:num_top]
        content.append(
            {
                **_chat_entry(token_id, row[token_id], texts),
                "top_logprobs": [_chat_entry(other, row[other], texts) for _, other in top],
            }
        )
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, texts: TokenText) -> dict[str, Any]:
    return {"token": texts.text_of(token_id), "logprob": _finite(entry), "bytes": list(texts.bytes_of(token_id))}


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
