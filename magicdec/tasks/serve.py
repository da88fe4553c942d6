"""A pair behind an OpenAI-compatible server."""

import functools
import importlib.util
import json
import logging
import os
import shlex
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.console import err
from magicdec.errors import ConfigError
from magicdec.tasks.options import draft_length
from magicdec.tasks.ranks import leave_if_not_first

KEY_VARIABLE = "MAGICDEC_API_KEY"


@dataclass(frozen=True)
class Address:
    """Where the server is, what it calls its model (None: the pair's name), and the keys that it asks for."""

    host: str
    port: int
    model: str | None
    api_keys: tuple[str, ...]


@dataclass(frozen=True)
class ServingLimits:
    """What requests may take. request_timeout, drain_timeout: seconds; None is no limit."""

    max_queue_size: int
    max_body_bytes: int
    max_prompt_tokens: int | None
    request_timeout: float | None
    drain_timeout: float


def serve_pair(
    engine: Path, options: dict[str, Any], limits: ServingLimits, address: Address, *, log_level: str
) -> None:
    """Serve until a signal ends it, and open requests have ended. options: of `LLM`, num_draft_tokens as it
    was typed."""
    _leave_if_not_first()
    if limits.request_timeout is not None and not limits.request_timeout > 0:
        raise ConfigError(
            f"--request-timeout {limits.request_timeout:g}: give seconds above 0, or leave it out for no limit"
        )
    if "" in (os.environ.get(KEY_VARIABLE), *address.api_keys):
        raise ConfigError(f"the API key is empty; give --api-key or {KEY_VARIABLE} a text, or leave both out")
    given = options | {"num_draft_tokens": draft_length(options["num_draft_tokens"])}
    _log_to_stderr(log_level)
    _check_installed()
    from prometheus_client import CollectorRegistry, disable_created_metrics

    from magicdec.runtime.llm import LLM
    from magicdec.runtime.openai.app import make_app
    from magicdec.runtime.openai.server import Server, bound_socket
    from magicdec.runtime.openai.service import Limits, Service
    from magicdec.runtime.serving.async_llm import AsyncLLM
    from magicdec.runtime.serving.metrics import EngineMetrics

    with bound_socket(address.host, address.port) as listening:
        llm = LLM(engine, **given)
        # Those are a second series for each, of use to OpenMetrics alone.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        metrics = CollectorRegistry()
        with AsyncLLM(llm, max_queue_size=limits.max_queue_size, metrics=EngineMetrics(metrics, llm)) as served:
            name = address.model or llm.config.name
            each = Limits(limits.max_body_bytes, limits.max_prompt_tokens, limits.request_timeout)
            app = make_app(Service(served, name, metrics, each, created=int(time.time())), address.api_keys)
            started = functools.partial(_say_where, name, bool(address.api_keys))
            Server(app, served, drain_timeout=limits.drain_timeout, on_start=started).run([listening])


def _leave_if_not_first() -> None:
    """A SIGTERM to all ranks is rank 0's to answer: the others serve it until it has drained."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_if_not_first()
    signal.signal(signal.SIGTERM, before)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=level.upper())


def _check_installed() -> None:
    """ConfigError, with the mend, if the libraries of the extra are not there."""
    for name in ("fastapi", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"serve needs {name}, which is not installed; run: pip install 'magicdec[serve]'")


def _say_where(model: str, has_key: bool, host: str, port: int) -> None:
    """The start-up line, and a command to try it with."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 32, "stream": True})
    key = ' -H "Authorization: Bearer $MAGICDEC_API_KEY"' if has_key else ""
    console = err()
    console.print(
        f"Serving {model} at {address} (open it in a browser; OpenAI's API is under {address}/v1). Try it:",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"curl -N {address}/v1/completions{key} -d {shlex.quote(body)}", markup=False, soft_wrap=True)
