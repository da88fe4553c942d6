"""What goes wrong, in OpenAI's shape and with HTTP's codes."""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from magicdec.errors import EngineFailedError, MagicDecError, NotReadyError, QueueFullError
from magicdec.runtime.sampling_params import SamplingParams

MAX_CHARS = 1000  # of a message, which may quote what was sent
RETRY_SECONDS = {429: "1", 503: "5"}
CLIENT_LEFT = 499  # nobody reads it; nginx's code for it, in the log
_FIELDS = {"prompt", *SamplingParams.model_fields}
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_FIELD = re.compile(r"(sampling parameter |the )?(\w+)")


class ApiError(MagicDecError):
    """An answer other than success. param: the field that is wrong; code: a word that a program can compare."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= MAX_CHARS else f"{message[:MAX_CHARS]}...")
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {"Retry-After": RETRY_SECONDS[self.status]} if self.status in RETRY_SECONDS else None
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: MagicDecError) -> ApiError:
    """Which answer an error of the engine's makes; what is no other's fault is the request's."""
    text = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, text, code="queue_full")
    if isinstance(error, NotReadyError):
        return ApiError(503, text, code="not_ready")
    if isinstance(error, EngineFailedError):
        return ApiError(500, text, code="engine_failed")
    return ApiError(400, text, param=_field(text))


def _field(text: str) -> str | None:
    """What the engine's message is about; it begins with the name."""
    found = _FIELD.match(text)
    if found and (found[1] == "sampling parameter " or found[2] in _FIELDS):
        return found[2]
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Every error of the app's leaves in OpenAI's shape."""

    @app.exception_handler(MagicDecError)
    async def known(request: Request, error: MagicDecError) -> JSONResponse:
        answer = as_api_error(error)
        request.state.log["error"] = answer.code or "invalid_request"
        return answer.response()

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            answer = ApiError(405, f"{where} is not offered; use another method", code="method_not_allowed").response()
            answer.headers.update(error.headers or {})  # which are allowed
            return answer
        return ApiError(error.status_code, f"{where} is not offered here", code="unknown_url").response()


def internal_error(request_id: str) -> ApiError:
    """The answer to what should not happen; the log has the rest."""
    return ApiError(500, f"internal error; the server's log has it under request {request_id}", code="internal_error")
