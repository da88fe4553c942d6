"""Stand-ins for the packages `tensorrt` and `tensorrt_llm` (1.2), so that the TensorRT-LLM backend runs without a GPU.

They hold what this project uses of the real interface, with its names, arguments and defaults (`api.json`), and refuse
everything else. An "engine" is the recorded network, executed in PyTorch on the CPU through the real pool layout, from
raw addresses, with the lengths that the attention plugin would read, and nothing more.

Known differences from the real thing, on purpose: float32 attention kernels exist here (there are none on a GPU: the
build plan refuses float32); where a wrong tensor would read garbage on a GPU, an error is raised.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent
_NAMES = ("tensorrt", "tensorrt_llm", "magicdec.plugins.trtllm_models")


@contextmanager
def standin_packages() -> Iterator[None]:
    """`import tensorrt` and `import tensorrt_llm` find the stand-ins inside this block, and nothing remains after it.

    Child processes that multiprocessing spawns find them too.
    """
    forget_standin()
    sys.path.insert(0, str(ROOT))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))
        forget_standin()


def forget_standin() -> None:
    """Drop what was imported, so that the next import looks anew."""
    for name in [name for name in sys.modules if name in _NAMES or name.startswith(("tensorrt.", "tensorrt_llm."))]:
        del sys.modules[name]
