"""The house stays in order: small folders, short functions, and the names that users were given."""

import ast
import subprocess
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MOST_FILES, MOST_LINES = 16, 60
SOURCES = ("magicdec", "builder", "plugins", "runtime", "configs", "benchmarks")
# Their length is that of their options' help texts.
SIGNATURES = ROOT / "magicdec/commands"


def files() -> list[Path]:
    """Committed Python files of the package and the benchmarks; the links in magicdec/ are no folders."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split() if name.split("/")[0] in SOURCES]


def crowded(paths: list[Path]) -> dict[str, int]:
    """Folders with too many files."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in paths)
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def long_functions(name: str, source: str) -> list[str]:
    """Functions of too many lines, as `name: function`."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f"{name}: {node.name}" for node in found if (node.end_lineno or 0) - node.lineno >= MOST_LINES]


def test_no_folder_is_crowded() -> None:
    assert len(files()) > 150
    assert crowded(files()) == {}
    assert crowded([ROOT / f"runtime/{index}.py" for index in range(MOST_FILES + 1)]) == {"runtime": MOST_FILES + 1}


def test_no_function_is_long() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in files() if path.parent != SIGNATURES}
    assert [found for path, text in sources.items() for found in long_functions(str(path), text)] == []
    assert long_functions("x", "def f():\n" + "    pass\n" * MOST_LINES) == ["x: f"]
    assert long_functions("x", "def f():\n" + "    pass\n" * (MOST_LINES - 1)) == []


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("magicdec.runtime.metrics", "EngineMetrics", "magicdec.runtime.serving.metrics"),
        ("magicdec.runtime.metrics_mirror", "MetricsMirror", "magicdec.runtime.serving.metrics_mirror"),
        ("magicdec.runtime.parallel", "join_ranks", "magicdec.runtime.parallel.leader"),
        ("magicdec", "AsyncLLM", "magicdec.runtime.serving.async_llm"),
    ],
)
def test_names_that_the_documents_gave_are_still_there(module: str, name: str, home: str) -> None:
    assert getattr(import_module(module), name) is getattr(import_module(home), name)


def test_a_package_names_what_it_has_not() -> None:
    with pytest.raises(AttributeError, match=r"'magicdec\.runtime\.parallel' has no attribute 'nothing'"):
        import_module("magicdec.runtime.parallel").nothing  # noqa: B018
