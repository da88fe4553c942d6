"""`magicdec serve` on two ranks: SIGTERM reaches all of them, and they serve rank 0 until it has drained."""

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai import OpenAI

from tests.runtime.parallel.launch import MPIEXEC
from tests.support.engines import tiny_pair

SECONDS = 60.0


@pytest.mark.slow
def test_drains_on_all_ranks(tmp_path: Path) -> None:
    pair, log = tiny_pair(tmp_path, "self", vocab_size=300, tp_size=2), tmp_path / "log"
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "magicdec", "serve", "--engine", str(pair), "--port", "0"]
    with log.open("wb") as stderr:
        launcher = subprocess.Popen(command, stderr=stderr)
    try:
        url = _url_shown(launcher, log)
        with OpenAI(base_url=url.removesuffix("/completions"), api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny", prompt="Once", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            launcher.send_signal(signal.SIGTERM)
            *_, last = stream
        assert last.choices[0].finish_reason == "length"
        assert launcher.wait(SECONDS) == 0
    finally:
        launcher.kill()
        launcher.wait()


def _url_shown(launcher: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and launcher.poll() is None:
        found = [line for line in log.read_text().splitlines(keepends=True) if line.startswith("curl ")]
        if found and found[0].endswith("\n"):
            return shlex.split(found[0])[2]
        time.sleep(0.05)
    raise AssertionError(f"the server does not start: {log.read_text()}")
