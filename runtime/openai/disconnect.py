"""Noticing that a client has gone while its answer is being made."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.types import Receive


@contextlib.asynccontextmanager
async def on_disconnect(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call `leave` if the connection closes within the block. The request's body must have been read."""
    watcher = asyncio.create_task(_watch(receive, leave))
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
