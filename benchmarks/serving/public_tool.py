"""aiperf, NVIDIA's load generator, in a virtual environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from server import Server

REQUIREMENT = "aiperf==0.13.0"
METRICS = {
    "time_to_first_token": "TTFT",
    "inter_token_latency": "ITL",
    "request_latency": "request latency",
    "output_token_throughput_per_user": "output tokens/s of one user",
    "output_sequence_length": "output tokens",
    "input_sequence_length": "prompt tokens",
}
TOTALS = {"output_token_throughput": "output tokens/s", "request_throughput": "requests/s", "request_count": "requests"}


class ToolError(Exception):
    """It could not be installed or has failed; the text says what it said."""


def install(directory: Path, timeout: float) -> Path:
    """The program, installed if need be (1.2 GB, a minute)."""
    environment = directory / "aiperf"
    program, done = environment / "bin" / "aiperf", environment / "installed"
    if done.is_file() and done.read_text() == REQUIREMENT:
        return program
    sys.stderr.write(f"installing {REQUIREMENT}\n")
    _run([sys.executable, "-m", "venv", "--clear", str(environment)], timeout)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, REQUIREMENT], timeout)
    done.write_text(REQUIREMENT)
    return program


def measure(program: Path, server: Server, model: str, tokenizer: Path, work: Path, load: dict[str, int]) -> dict:
    """Its own figures of streamed completions. load: requests, concurrency, prompt_tokens, output_tokens.

    Prompts are of its own making, from Shakespeare.
    """
    command = [
        *(str(program), "profile", "--ui", "none", "--no-gpu-telemetry", "--random-seed", "1"),
        *("--url", server.url, "--model", model, "--tokenizer", str(tokenizer.resolve())),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *("--request-count", str(load["requests"]), "--concurrency", str(load["concurrency"])),
        *("--isl", str(load["prompt_tokens"]), "--prompt-input-tokens-stddev", "0"),
        *("--osl", str(load["output_tokens"]), "--prompt-output-tokens-stddev", "0"),
        *("--extra-inputs", json.dumps({"temperature": 0, "ignore_eos": True})),
        *("--artifact-dir", str(work)),
    ]
    _run(command, 1800)
    exported = json.loads((work / "profile_export_aiperf.json").read_text())
    return {"tool": REQUIREMENT, **load, **figures(exported)}


def figures(exported: dict[str, Any]) -> dict[str, Any]:
    """Of its export: totals, and [average, median, 99th percentile, unit] of each distribution."""
    errors = exported.get("error_request_count") or {"avg": 0}
    return {
        "errors": errors["avg"],
        "totals": {name: exported[key]["avg"] for key, name in TOTALS.items()},
        "metrics": {
            name: [exported[key][part] for part in ("avg", "p50", "p99", "unit")] for key, name in METRICS.items()
        },
    }


def _run(command: list[str], timeout: float) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # it misreads that
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise ToolError(f"{' '.join(command[:4])} ... took over {timeout:.0f} s") from None
    if done.returncode:
        raise ToolError((done.stderr.strip() or done.stdout.strip())[-2000:])
