"""Builds the native CPU library beside the package; everything else about the project stands in pyproject.toml.

The library has a C interface and needs a C++20 compiler only. Sources named *_kernels.cpp are compiled once for each
instruction set, the set is chosen when the library is loaded. Where it cannot be built, the installation goes on
without it, and the package runs on PyTorch alone and says so.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("magicdec/plugins/cpu/csrc")
COMMON = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 warns of its own header of intrinsics
]
# By the name in csrc/isa.h; the portable one is what the compiler makes for the architecture itself.
X86 = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx2", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}


def instruction_sets() -> dict[str, list[str]]:
    return {"portable": [], **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}


def sources_hash() -> str:
    """As plugins/cpu/library.py computes it, so that a library which is older than its sources is not loaded."""
    files = sorted(SOURCES.iterdir(), key=lambda path: path.name)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


class BuildNative(build_ext):
    """Compiles each source with the flags of its instruction sets, and links all objects into one library."""

    def build_extension(self, ext: Extension) -> None:
        kernels = [source for source in ext.sources if source.endswith("_kernels.cpp")]
        others = [source for source in ext.sources if source not in kernels]
        objects = self._compile(ext, others, "all", [])
        for name, flags in instruction_sets().items():
            objects += self._compile(ext, kernels, name, flags)
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")

    def _compile(self, ext: Extension, sources: list[str], name: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            sources,
            output_dir=str(Path(self.build_temp) / name),
            macros=[
                (f"MAGICDEC_{name.upper()}", "1"),
                ("MAGICDEC_X86", str(int(len(instruction_sets()) > 1))),
                ("MAGICDEC_SOURCES", f'"{sources_hash()}"'),
            ],
            extra_postargs=COMMON + flags,
            depends=ext.depends,
        )


sources, headers = (sorted(map(str, SOURCES.glob(pattern))) for pattern in ("*.cpp", "*.h"))
setup(
    ext_modules=[Extension("magicdec.plugins.cpu._native", sources, depends=headers, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
