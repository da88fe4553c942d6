"""How both endpoints answer: whole, or as events."""

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from magicdec.runtime.openai.answers.answer import Answer
from magicdec.runtime.openai.answers.event_stream import EventStream
from magicdec.runtime.openai.disconnect import on_disconnect
from magicdec.runtime.openai.generation import Generation


async def respond(http: Request, generation: Generation, answer: Answer, *, stream: bool) -> Response:
    """The answer; a client that leaves before its end frees what the engine holds for it."""
    if stream:
        return EventStream(answer.chunks(), generation.leave)
    async with on_disconnect(http.receive, generation.leave):
        return JSONResponse(await answer.whole())
