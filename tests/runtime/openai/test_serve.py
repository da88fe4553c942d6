"""`magicdec serve` as a process: how it starts, what it refuses, and how it leaves."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import APIError, OpenAI
from typer.testing import CliRunner

from magicdec.cli import app
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.serving import SECONDS

PROMPT = "Once upon a time"


@contextmanager
def process(pair: str, log: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end, if it is still there."""
    command = [sys.executable, "-m", "magicdec", "serve", "--engine", pair, "--port", "0", *options]
    with log.open("wb") as stderr:
        running = subprocess.Popen(command, stderr=stderr, env={**os.environ, **environment})
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def command_shown(running: subprocess.Popen[bytes], log: Path) -> list[str]:
    """The words of the command that the start-up lines offer, once they are there."""
    end = time.monotonic() + 2 * SECONDS
    while time.monotonic() < end and running.poll() is None:
        lines = log.read_text().splitlines(keepends=True)
        found = [line for line in lines if line.startswith("curl ") and line.endswith("\n")]
        if found:
            return shlex.split(found[0])
        time.sleep(0.05)
    raise AssertionError(f"the server does not start: {log.read_text()}")


def test_starts_serves_and_drains(pair: str, llm: LLM, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process(pair, log, "--served-model-name", "mine", MAGICDEC_API_KEY="secret") as running:
        curl, quiet, url, flag, header, data, body = command_shown(running, log)
        assert (curl, quiet, flag, header, data) == (
            "curl",
            "-N",
            "-H",
            "Authorization: Bearer $MAGICDEC_API_KEY",
            "-d",
        )
        assert f"Serving mine at {url.removesuffix('/v1/completions')} " in log.read_text()
        answer = httpx2.post(url, content=body, headers={"Authorization": "Bearer secret"}, trust_env=False)
        assert answer.text.endswith("data: [DONE]\n\n")
        with OpenAI(base_url=url.removesuffix("/completions"), api_key="secret", max_retries=0) as client:
            params: dict[str, Any] = {"seed": 3, "max_tokens": 1900}
            extra: dict[str, Any] = {"ignore_eos": True, "num_draft_tokens": 1}
            stream = client.completions.create(
                model="mine",
                prompt=PROMPT,
                stream=True,
                extra_body=extra,
                extra_headers={"X-Request-Id": "last"},
                **params,
            )
            text = next(stream).choices[0].text
            running.send_signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].text for chunk in stream)
        assert running.wait(SECONDS) == 0
    expected = llm.generate(PROMPT, SamplingParams(**params, **extra))[0]
    assert text == expected.outputs[0].text
    assert "last POST /v1/completions 200" in log.read_text()
    assert "secret" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_time_to_drain_is_bounded(pair: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process(pair, log, "--drain-timeout", "0", "--num-draft-tokens", "0", "--log-level", "warning") as running:
        url = command_shown(running, log)[2]
        with OpenAI(base_url=url.removesuffix("/completions"), api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny", prompt=[PROMPT] * 4, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
            )
            next(stream)
            running.send_signal(signal.SIGINT)
            with pytest.raises(APIError, match="shutting down"):
                list(stream)
        assert running.wait(SECONDS) == 0
    assert len(log.read_text().splitlines()) == 2, "the start-up lines alone"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--host", "no.such.host.invalid"], "no address"),
        (["--request-timeout", "0"], "above 0"),
        (["--api-key", ""], "empty"),
        (["--num-draft-tokens", "many"], "whole number"),
        (["--max-seq-len", "99999"], "max_seq_len"),
    ],
)
def test_options_that_cannot_be(pair: str, options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--engine", pair, "--port", "0", *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_port_in_use(pair: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", "--engine", pair, "--port", port])
    assert result.exit_code == 2
    assert port in result.stderr
    assert "--port" in result.stderr


def test_no_engine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--engine", str(tmp_path), "--port", "0"])
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr


def test_empty_key_in_the_environment(pair: str) -> None:
    """It would leave the server open, where a key was meant."""
    result = CliRunner().invoke(app, ["serve", "--engine", pair], env={"MAGICDEC_API_KEY": ""})
    assert result.exit_code == 2
    assert "MAGICDEC_API_KEY" in result.stderr


def test_library_missing(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else name)
    result = CliRunner().invoke(app, ["serve", "--engine", pair])
    assert result.exit_code == 2
    assert "magicdec[serve]" in result.stderr


def test_help() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for word in ("/v1/chat/completions", "--drain-timeout", "SIGTERM", "MAGICDEC_API_KEY"):
        assert word in result.stdout
