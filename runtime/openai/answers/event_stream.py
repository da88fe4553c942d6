"""Server-sent events as OpenAI's clients read them."""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from magicdec.errors import MagicDecError
from magicdec.runtime.openai.disconnect import on_disconnect
from magicdec.runtime.openai.errors import as_api_error, internal_error

DONE = b"data: [DONE]\n\n"
logger = logging.getLogger(__name__)


class EventStream(Response):
    """Chunks as events, then [DONE]. leave: called if the client goes.

    The answer begins with the first chunk, so that what fails before it gets its own HTTP code. What fails later is
    the last event before [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Mapping[str, Any], None], leave: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._leave = chunks, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; an ASGI application."""
        async with on_disconnect(receive, self._leave), aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, _event(first))
            try:
                async for chunk in chunks:
                    await self._send(send, _event(chunk))
            except Exception as error:
                await self._send(send, _event(_failure(error, scope["state"])))
            await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send(send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _failure(error: Exception, state: dict[str, Any]) -> dict[str, Any]:
    if isinstance(error, MagicDecError):
        answer = as_api_error(error)
    else:
        logger.error("request %s failed", state["request_id"], exc_info=error)
        answer = internal_error(state["request_id"])
    state["log"]["error"] = answer.code
    return answer.body()
