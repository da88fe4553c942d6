"""`magicdec serve` as a process of its own, and what can be seen of it from outside."""

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

STARTED = re.compile(r"at (http://\S+)")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says


class ServerError(Exception):
    """The server did not start, or did not end as it should; the text holds the end of its log."""


class Server:
    """Runs while it is entered, on a free port of 127.0.0.1."""

    def __init__(self, engine: Path, options: list[str], log: Path, *, timeout: float = 180) -> None:
        self.command = [sys.executable, "-m", "magicdec", "serve", "--engine", str(engine), "--port", "0", *options]
        self.log = log
        self.timeout = timeout
        self.url = ""

    def __enter__(self) -> "Server":
        with self.log.open("w") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        if error is None and code != 0:
            raise ServerError(self._report("did not stop" if code is None else f"ended with exit code {code}"))

    @property
    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, with the labels as they stand in the text: `name{label="value"}`."""
        samples = {}
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                name = sample.name.removeprefix("magicdec:")
                samples[f"{name}{{{labels}}}" if labels else name] = sample.value
        return samples

    def wait_until_idle(self) -> dict[str, float]:
        """The metrics, once no request is left; what clients have given up may take a step to go."""
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            metrics = self.metrics()
            if metrics["num_requests_running"] == metrics["num_requests_waiting"] == 0:
                return metrics
            time.sleep(0.1)
        raise ServerError(self._report("still has requests that no client waits for"))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerError(self._report(f"ended with exit code {self._process.returncode}"))
            found = STARTED.search(self.log.read_text())
            if found:
                self.url = found[1]
                self._get("/ready")
                return
            time.sleep(0.1)
        raise ServerError(self._report("did not start"))

    def _get(self, path: str) -> str:
        with _opener.open(self.url + path, timeout=self.timeout) as response:
            return str(response.read().decode())

    def _report(self, what: str) -> str:
        return f"{' '.join(self.command[2:4])} {what}; the end of its log:\n{self.log.read_text()[-2000:]}"
