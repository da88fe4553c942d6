"""The Triton kernels: run in Triton's interpreter, and compiled for the GPUs that they are for. No GPU is needed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from magicdec.plugins import acceptance_kernel
from tests.support.paths import ROOT

INTERPRETED = Path(__file__).with_name("interpreted_acceptance.py")
KERNELS = ("_summarize", "_decide", "_subtract", "_choose")
TYPES = {
    **dict.fromkeys(("stride", "draft_stride"), "i64"),
    **dict.fromkeys(("vocab_size", "blocks"), "i32"),
    **dict.fromkeys(("starts", "ints", "sums", "best_ids", "results", "excesses"), "*i64"),
    **dict.fromkeys(("floats", "tops", "best"), "*fp64"),
    **dict.fromkeys(("BLOCK", "BLOCKS"), "constexpr"),
}


def interpret(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marker, str(INTERPRETED)]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_in_the_interpreter() -> None:
    interpret("not slow")


@pytest.mark.slow
def test_in_the_interpreter_thousands_of_times() -> None:
    interpret("slow")


@pytest.mark.parametrize(
    ("capability", "one_block", "logits"),
    [
        *((80, False, logits) for logits in ("bf16", "fp64")),
        *((80, True, logits) for logits in ("fp32", "fp16")),
        *((90, False, logits) for logits in ("fp32", "fp16")),
        *((90, True, logits) for logits in ("bf16", "fp64")),
    ],
)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_the_device(name: str, capability: int, one_block: bool, logits: str) -> None:
    """Also that no product is fused with a sum: but for the logarithm of the noise, none of these kernels may.

    Every type meets each device and each number of blocks, and every device meets both numbers.
    """
    draft_probs = "fp64" if logits == "fp64" else "fp32"
    kernel: Any = getattr(acceptance_kernel, name)
    types = TYPES | {"logits": f"*{logits}", "draft_probs": f"*{draft_probs}"}
    constants = {"BLOCK": 1024, "BLOCKS": 1 if one_block else 128}
    if one_block:  # triton makes a constant of a number that is 1
        types["blocks"], constants["blocks"] = "constexpr", 1
    used = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(kernel, {key: types[key] for key in kernel.arg_names}, constexprs=used)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert re.search(r"mul\.rn\.f64|mul\.f64", ptx)
    if name != "_summarize":
        assert "fma" not in ptx
