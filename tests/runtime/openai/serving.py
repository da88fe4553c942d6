"""The real server on a free loopback port, with a tiny pair behind it, for tests that speak HTTP to it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI
from prometheus_client import CollectorRegistry

from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.app import make_app
from magicdec.runtime.openai.server import Server, bound_socket
from magicdec.runtime.openai.service import Limits, Service
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.serving.metrics import EngineMetrics
from tests.support.engines import tiny_pair

SECONDS = 30.0  # that nothing here takes, unless it hangs
MODEL = "tiny"


def wide_pair(directory: Path) -> Path:
    """A pair whose tokenizer covers every byte."""
    return tiny_pair(directory, "self", vocab_size=300, max_seq_len=2048)


@dataclass
class Served:
    """A running server. client: OpenAI's, which never tries twice. http: for what that client would not send."""

    url: str
    llm: AsyncLLM
    server: Server
    client: OpenAI
    http: httpx2.Client
    pool: ThreadPoolExecutor

    @property
    def num_used_blocks(self) -> int:
        """KV blocks that some request holds."""
        return self.llm.num_used_blocks

    def post(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx2.Response:
        """A request as anything might send it."""
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers=headers)
        return self.http.post(path, json=body, headers=headers)

    def later(self, path: str, body: dict[str, Any]) -> "Future[httpx2.Response]":
        """The same by a thread of its own."""
        return self.pool.submit(self.post, path, body)

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """The events of a stream; leaving the block closes the connection."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)

    def is_idle(self) -> bool:
        """Whether nothing is open and nothing is held."""
        return self.llm.num_open_requests == 0 and self.num_used_blocks == 0


@contextmanager
def serving(
    llm: LLM,
    *,
    limits: Limits | None = None,
    api_keys: Sequence[str] = (),
    max_queue_size: int = 256,
    drain_timeout: float = 0,
) -> Iterator[Served]:
    """Serve it until the block ends; then the server must be gone, and the engine hold nothing."""
    registry, started = CollectorRegistry(), threading.Event()
    with (
        bound_socket("127.0.0.1", 0) as listening,
        AsyncLLM(llm, max_queue_size=max_queue_size, metrics=EngineMetrics(registry, llm)) as served,
    ):
        service = Service(served, MODEL, registry, limits or Limits(), created=1)
        app = make_app(service, api_keys)
        server = Server(app, served, drain_timeout=drain_timeout, on_start=lambda *_: started.set())
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        assert started.wait(SECONDS)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        key = api_keys[0] if api_keys else "none"
        try:
            with (
                OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=SECONDS) as client,
                httpx2.Client(base_url=url, timeout=SECONDS, trust_env=False) as http,
                ThreadPoolExecutor(16) as pool,
            ):
                yield Served(url, served, server, client, http, pool)
        finally:
            server.stop()
            thread.join(SECONDS)
            assert not thread.is_alive(), "the server does not stop"
    if served.status == "stopped":
        llm.engine.check_integrity()


@contextmanager
def held(llm: LLM) -> Iterator[threading.Semaphore]:
    """Every step of the engine waits for a release of the semaphore; in the end all go."""
    gate, step, is_open = threading.Semaphore(0), llm.engine.step, threading.Event()

    def wait_and_step() -> list[RequestOutput]:
        while not is_open.is_set() and not gate.acquire(timeout=0.01):
            pass
        return step()

    llm.engine.step = wait_and_step  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        is_open.set()
        llm.engine.step = step  # type: ignore[method-assign]


@contextmanager
def slowed(llm: LLM, seconds: float) -> Iterator[None]:
    """Every step of the engine takes longer."""
    step = llm.engine.step

    def wait_and_step() -> list[RequestOutput]:
        time.sleep(seconds)
        return step()

    llm.engine.step = wait_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Or fail."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {SECONDS:g} s: {what}"
        time.sleep(0.005)
