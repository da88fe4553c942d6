"""The peers' table names who wins and what is missing; nothing is installed here."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.results import cell, result
from tests.support.paths import ROOT

PEERS = ROOT / "benchmarks/peers"


@pytest.fixture
def peers() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, which import each other as a script's do."""
    sys.path.insert(0, str(PEERS))
    try:
        import environments  # type: ignore[import-not-found]
        import table  # type: ignore[import-not-found]

        yield {"environments": environments, "table": table}
    finally:
        sys.path.remove(str(PEERS))
        for name in ("environments", "table"):
            sys.modules.pop(name, None)


def entry(engine: str, mode: str, rate: float | None, error: str | None = None, batch: int = 1) -> dict[str, Any]:
    runs = [] if rate is None else [{"precision": "bfloat16"}]
    values = {"engine": engine, "mode": mode, "batch": batch, "context": 4096, "runs": runs}
    return values | {"error": error, "tokens_per_second": rate}


def test_the_table_says_who_wins_and_what_failed(peers: dict[str, ModuleType]) -> None:
    result = {
        "created": "today",
        "machine": "a machine",
        "threads": 2,
        "output_tokens": 8,
        "repeats": 1,
        "versions": {"magicdec": {"magicdec": "1"}},
        "missing": {"openvino-genai": "no such\npackage"},
        "entries": [
            entry("magicdec", "plain", 40.0),
            entry("magicdec", "self", 50.0),
            entry("transformers", "plain", 20.0),
            entry("transformers", "lookup", 80.0),
            entry("llama.cpp", "plain", None, "took over 600 s"),
            entry("magicdec", "plain", 100.0, batch=8),
        ],
    }
    text = peers["table"].markdown(result)
    assert "| transformers, lookup | 80.0 | not offered |" in text
    assert "| llama.cpp, plain | failed | not offered |" in text
    assert "1 x 4,096, plain: 2.00 x (plain against transformers's plain): ahead" in text
    assert "1 x 4,096, best mode: 0.62 x (self against transformers's lookup): BEHIND: transformers wins" in text
    assert "openvino-genai was not measured: no such package" in text
    assert "llama.cpp, plain, 1 x 4,096 failed: took over 600 s" in text
    assert "8 x 4,096, plain:" not in text  # no one to compare with


def test_a_command_that_fails_or_hangs_is_told_with_its_reason(peers: dict[str, ModuleType]) -> None:
    environments = peers["environments"]
    assert environments.run([sys.executable, "-c", "print(5)"], 60) == "5\n"
    with pytest.raises(environments.NotAvailable, match="no wheel for you"):
        environments.run([sys.executable, "-c", "raise SystemExit('no wheel for you')"], 60)
    with pytest.raises(environments.NotAvailable, match=r"took over 0 s"):
        environments.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_the_workers_of_all_peers_are_there(peers: dict[str, ModuleType]) -> None:
    environments = peers["environments"]
    for peer in (environments.OURS, *environments.PEERS):
        assert (PEERS / "workers" / peer.worker).is_file()
        assert peer.modes[0] == "plain"
        assert set(peer.batch_modes) <= set(peer.modes)
        assert all("==" in requirement for requirement in peer.requirements)


def test_the_page_is_filled_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/pages"))
    script = import_module("measure_speed")
    for marks in (script.BENCH_MARKS, script.AUTO_MARKS, script.WINDOW_MARKS, script.PEER_MARKS):
        assert all(script.PAGE.read_text().count(mark) == 1 for mark in marks)
    page, marks = tmp_path / "page.md", script.BENCH_MARKS
    page.write_text(f"before {marks[0]}\nold\n{marks[1]} behind")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "speedup-old.png").write_text("")
    (tmp_path / "images" / "page.png").write_text("of another script")
    script.fill(page, marks, script.bench_part(result(), tmp_path / "images"))
    text = page.read_text()
    assert text.startswith(f"before {marks[0]}\n![")
    assert text.endswith(f"{marks[1]} behind")
    assert "old" not in text.replace("holds", "")
    images = sorted(path.name for path in (tmp_path / "images").iterdir() if path.name != "page.png")
    assert len(images) == 8
    assert (tmp_path / "images" / "page.png").exists()
    assert all(f"(images/{name})" in text for name in images)
    assert "Temperature 1." in text
    assert "| self w512 x4 |" in text
    assert "\n</details>\n\nMedians of" in text
    cells = (*result().cells, cell(1024, "auto", window=512, length=None))
    auto = script.auto_part(result().model_copy(update={"cells": cells})).splitlines()
    assert auto[2] == "| 1,024 | 1 | 0 | self w512 x2 | 1.44 | 1.44 | 1.00 |"
    assert auto[4] == "At 1 of 1 points auto reaches 0.97 or more; median 1.00."
    windows = script.windows_part(result()).splitlines()
    assert windows[0].startswith("| context | batch | T | self w256 x2 |")
    assert windows[2].startswith("| 1,024 | 1 | 0 | **")
    assert all("~1.50" in line for line in windows if line.startswith("| 32,768"))
