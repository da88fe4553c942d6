"""`make torch-cuda-check` where there is no card: it refuses, and its script runs as a rehearsal."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.paths import ROOT


def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.cuda_check", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | env, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_refuses_without_a_cuda_device() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "sees no CUDA device" in done.stderr


def test_rehearsal_compares_everything() -> None:
    done = run("--rehearse", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("no GPU", "acceptance, V=50", "Qwen3 logits, bfloat16", "whole runs, in_cache", "speed, 2 requests"):
        assert part in done.stdout
    assert "NOT CHECKED" not in done.stdout
