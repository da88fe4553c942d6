"""The HTTP server: listens, and leaves in good order."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from magicdec.errors import ConfigError
from magicdec.runtime.serving.async_llm import AsyncLLM

FLUSH_SECONDS = 5  # for answers that are complete and not yet read


def bound_socket(host: str, port: int) -> socket.socket:
    """Take the address before anything slow is done. port 0: any free one.

    Raises:
        ConfigError: it is in use, not ours, or none.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address: {error}; give one of this machine's") from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; give another --port") from error
    return taken


class Server(uvicorn.Server):
    """uvicorn's, with a drain: after the first SIGTERM or SIGINT open requests may end, new ones get 503.

    drain_timeout: seconds that open requests have. A second signal ends them at once. on_start is called with the
    socket's address when connections are taken.
    """

    def __init__(
        self,
        app: FastAPI,
        llm: AsyncLLM,
        *,
        drain_timeout: float,
        on_start: Callable[[str, int], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self._llm, self._drain_timeout, self._on_start = llm, drain_timeout, on_start
        self._num_signals = 0
        self._drains: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does; then tell where."""
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        self._on_start(host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as uvicorn does; then cut off the clients that have not read their answers."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # which lets them close

    def stop(self) -> None:
        """Drain; the second time, end at once. From any thread or signal handler: it only leaves a note."""
        self._num_signals += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's signature
        """A signal; the process leaves with exit code 0 once it is drained."""
        assert sig in (signal.SIGINT, signal.SIGTERM)
        self.stop()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave."""
        for timeout in (self._drain_timeout, 0.0)[len(self._drains) : self._num_signals]:
            self._drains.append(asyncio.create_task(asyncio.to_thread(self._llm.drain, timeout)))
        drained = any(task.done() for task in self._drains)
        return await super().on_tick(counter) or drained
