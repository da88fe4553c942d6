"""Around every request: its id and its line in the log, and the key that it must have."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from magicdec.runtime.openai.errors import ApiError, internal_error

REQUEST_ID = "X-Request-Id"
_GOOD_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
logger = logging.getLogger(__name__)


class RequestLog:
    """Gives each request an id (the client's own X-Request-Id where it has a good one), and logs how it ended.

    `request.state.log` takes what else the line should tell: a value of None is left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve and log; an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, notes, start = _request_id(scope), dict[str, Any](), time.monotonic()
        scope.setdefault("state", {}).update(request_id=request_id, log=notes)
        status = 0  # none yet

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by the server, which is leaving: this client does not read its answer
            notes["error"] = "cut_off"
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:  # the answer has begun: only breaking it off tells that it is not whole
                raise
            await internal_error(request_id).response()(scope, receive, send_with_id)
        finally:
            rest = "".join(f" {name}={value!r}" for name, value in notes.items() if value is not None)
            seconds = time.monotonic() - start
            logger.info("%s %s %s %d %.3fs%s", request_id, scope["method"], scope["path"], status, seconds, rest)


class ApiKeys:
    """Refuses requests to /v1 without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and serve; an ASGI application."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and not self._knows(Headers(scope=scope)):
            scope["state"]["log"]["error"] = "invalid_api_key"
            refusal = ApiError(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1")  # the bytes as they were sent
        return scheme.lower() == "bearer" and any([secrets.compare_digest(key, known) for known in self._keys])


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
