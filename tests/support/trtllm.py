"""TensorRT-LLM engines on the stand-in: compiled pairs, and memory that the stand-in knows."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from magicdec.builder.trtllm import rules as trtllm_rules
from magicdec.builder.trtllm.compile import compile_engines
from magicdec.builder.trtllm.plan import plan_engines
from magicdec.pair.config import ROLES, Role
from magicdec.pair.manifest import load_pair
from magicdec.runtime.runners.trtllm import runner as trtllm_runner
from magicdec.runtime.runners.trtllm.memory import Memory
from tests.standin import standin_packages


class StandinMemory(Memory):
    """Memory of a runner that executes on the stand-in."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device, allow_cpu=True)
        import_module("tensorrt").standin_memory(self)


@contextmanager
def standin() -> Iterator[None]:
    """The stand-in packages, runners whose memory they know, and float32, which no GPU has attention kernels for."""
    with standin_packages(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtllm_runner, "Memory", StandinMemory)
        patch.setattr(trtllm_rules, "FMHA_DTYPES", {*trtllm_rules.FMHA_DTYPES, "float32"})
        try:
            yield
        finally:
            import_module("tensorrt").forget_memories()


def compile_pair(source: Path, output: Path) -> Path:
    """A copy of a pair that was built for PyTorch, with engines; call inside `standin()`."""
    shutil.copytree(source, output)
    config = load_pair(output).config
    folders: dict[Role, Path] = {role: output / role for role in ROLES if (output / role).is_dir()}
    plans = plan_engines(config, {role: read_checkpoint(folder) for role, folder in folders.items()})
    for role, folder in folders.items():
        compile_engines(folder, plans[role], workers=0)
        manifest = json.loads((folder / "engine.json").read_text())
        (folder / "engine.json").write_text(json.dumps(manifest | {"backend": "trtllm"}))
    return output


def read_checkpoint(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config
