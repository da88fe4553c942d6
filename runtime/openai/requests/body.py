"""The JSON body of a request, bounded."""

from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from magicdec.runtime.openai.errors import CLIENT_LEFT, ApiError

DISCARDED_BYTES = 64 << 20  # read and thrown away, so that a client that is still sending sees the answer


async def read_json(request: Request, max_bytes: int) -> Any:
    """What the body holds.

    Raises:
        ApiError: 413 for more than `max_bytes`, 400 for what is no JSON (NaN and broken UTF-8 included).
    """
    try:
        body = await _read(request, max_bytes)
    except ClientDisconnect:
        raise ApiError(CLIENT_LEFT, "the client closed the connection", code="client_left") from None
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes + DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise ApiError(
            413,
            f"the body is larger than the {max_bytes} bytes that this server takes; send a shorter prompt",
            code="body_too_large",
        )
    return b"".join(chunks)
