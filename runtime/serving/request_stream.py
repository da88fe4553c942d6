"""The answer to one request as it grows, read from any thread or event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from magicdec.runtime.outputs import RequestOutput

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class RequestStream(Iterator[RequestOutput], AsyncIterator[RequestOutput]):
    """Outputs of one request, cumulative: a slow reader skips to the newest one, so nothing piles up.

    Iterate over it, blocking or with `async for`; one reader. The last item is finished. Used as a context manager it
    aborts the request if it is left early.

    Raises, from the iteration: whatever ended the request without an answer, e.g. EngineFailedError.
    """

    def __init__(self, request_id: str, abort: Callable[[RequestStream], bool]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._changed = threading.Condition()
        self._newest: RequestOutput | None = None  # not yet read
        self._error: Exception | None = None
        self._closed = False  # nothing more will be put
        self._waiters: list[_Waiter] = []

    def abort(self) -> bool:
        """End the request; False if it has ended. The stream still gives a last output."""
        return self._abort(self)

    def put(self, output: RequestOutput) -> None:
        """Hand over a new state of the request; the engine's thread calls it."""
        with self._changed:
            self._newest, self._closed = output, output.finished
            self._wake()

    def fail(self, error: Exception) -> None:
        """Say that there will be no answer; the engine's thread calls it."""
        with self._changed:
            self._error, self._closed = error, True
            self._wake()

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> RequestOutput:
        with self._changed:
            self._changed.wait_for(self._is_ready)
            output = self._take()
        if output is None:
            raise StopIteration
        return output

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            with self._changed:
                if self._is_ready():
                    output = self._take()
                    break
                loop = asyncio.get_running_loop()
                woken: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, woken))
            await woken
        if output is None:
            raise StopAsyncIteration
        return output

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def _is_ready(self) -> bool:
        return self._newest is not None or self._closed

    def _take(self) -> RequestOutput | None:
        """The newest output, once; None at the end. What is there is read before an error is raised."""
        output, self._newest = self._newest, None
        if output is None and self._error is not None:
            raise self._error
        return output

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, woken in waiters:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_settle, woken)


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # e.g. its task was cancelled
        woken.set_result(None)
