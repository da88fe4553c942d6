"""Statistics, the JSON file, tables and plots of a benchmark, on runs that were never made."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from magicdec.bench import stats as bench_stats
from magicdec.bench.plots import PLOTS, check_plots, draw_plots
from magicdec.bench.result import BenchResult, Cell, load, save
from magicdec.bench.table import HEADS, markdown, rows, show
from magicdec.errors import ConfigError
from tests.bench.results import batch_run, cell, plain_run, result


def test_medians_and_spreads() -> None:
    found = bench_stats.spread([3.0, 1.0, 8.0])
    assert (found.median, found.low, found.high) == (3.0, 1.0, 8.0)
    assert bench_stats.spread([1.0, 2.0]).median == 1.5


def test_a_run_in_numbers() -> None:
    run = batch_run(2.0, steps=10, tokens=60, draft=0.6, verify=1.0)
    assert bench_stats.rate(run) == 30.0
    assert bench_stats.step_seconds(run) == 0.2
    assert bench_stats.host_seconds(run) == pytest.approx(0.04)
    assert bench_stats.acceptance_length(run, batch=2) == 3.0


def test_each_run_is_compared_with_its_neighbour() -> None:
    """A machine that is twice as slow for one pair changes no ratio."""
    runs, beside = [batch_run(1.0), batch_run(2.0), batch_run(1.0)], [plain_run(1.0), plain_run(2.0), plain_run(1.0)]
    assert bench_stats.speedups(runs, beside) == [1.5, 1.5, 1.5]
    summary = bench_stats.summarise(runs, beside, batch=1)
    assert summary.speedup is not None
    assert (summary.speedup.median, summary.speedup.low, summary.speedup.high) == (1.5, 1.5, 1.5)
    assert summary.acceptance_rate == 0.5
    assert summary.acceptance_length == 3.0
    assert (summary.step_ms, summary.draft_ms, summary.verify_ms) == pytest.approx((100, 60, 100))
    assert bench_stats.summarise(beside, [], batch=1).speedup is None
    assert bench_stats.summarise(beside, [], batch=1).acceptance_rate is None


def test_a_projection_takes_times_from_here_and_acceptance_from_there() -> None:
    here = bench_stats.summarise([batch_run(2.0, steps=10)], [plain_run()], batch=1)  # 200 ms a round
    plain = bench_stats.summarise([plain_run(2.0)], [], batch=1)  # 100 ms a step
    assert bench_stats.projected_speedup(here, plain, 3.6) == pytest.approx(1.8)


def test_the_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    save(result(), tmp_path / "bench.json")
    assert load(tmp_path / "bench.json") == result()
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["schema_version"] == 1
    assert len(data["cells"][1]["runs"]) == 2  # every run, not only what follows from them


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"cells": "none"}, "cells"),
        ({"speed": 3}, "speed"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result().model_dump() | change))
    with pytest.raises(ConfigError, match=reason):
        load(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(result().model_dump_json()[:500])
    with pytest.raises(ConfigError, match="no result of magicdec bench"):
        load(tmp_path / "cut.json")
    with pytest.raises(ConfigError, match="no result of magicdec bench"):
        load(tmp_path / "missing.json")


def test_a_table_has_a_row_a_cell_and_says_what_is_timing_only() -> None:
    text = markdown(result())
    assert len(list(rows(result().cells))) == len(result().cells)
    assert text.count("\n| ") + 1 == len(result().cells) + 1
    near, far = (one_row(cell(c, "self", window=512, length=4, beyond=c > 8192)) for c in (8192, 32768))
    assert (near["speedup"], near["kept"], near["same"]) == ("1.44 (1.38-1.50)", "50%", "yes")
    assert (far["speedup"], far["kept"], far["tokens/s"], far["tokens a step"]) == ("~1.50", "", "", "")
    assert far["step ms"] == near["step ms"] == "220.0"
    assert "timing only" in text
    assert "8 x 32,768 tokens, T=1 (time limit)" in text
    assert "timing only" not in markdown(near_only())


def one_row(each: Cell) -> dict[str, str]:
    return dict(zip(HEADS, next(iter(rows([each]))), strict=True))


def near_only() -> BenchResult:
    near = tuple(each for each in result().cells if not each.beyond_trained_len)
    return result().model_copy(update={"cells": near})


def test_auto_is_measured_against_what_it_can_choose() -> None:
    def at(each: Cell, speedup: float) -> Cell:
        summary = each.summary.model_copy(update={"speedup": bench_stats.spread([speedup])})
        return each.model_copy(update={"summary": summary})

    cells = [
        cell(1024),
        at(cell(1024, "self", window=512, length=4), 2.0),
        at(cell(1024, "self", window=256, length=4), 5.0),  # another window than auto's
        at(cell(1024, "self-full", length=4), 6.0),
        at(cell(1024, "self", window=512, length=4, batch=4), 7.0),
        at(cell(1024, "auto", window=512, length=None), 1.9),
    ]
    ((auto, share),) = bench_stats.auto_shares(cells)
    assert auto is cells[-1]
    assert share == pytest.approx(0.95)
    text = markdown(result().model_copy(update={"cells": tuple(cells)}))
    assert "It reaches 0.95 (at 1 x 1,024 tokens, T=0) to 0.95 times" in text
    assert bench_stats.auto_shares(cells[:-1]) == []
    ((_, share),) = bench_stats.auto_shares([cells[0], at(cells[1], 0.5), cells[-1]])
    assert share == pytest.approx(1.9), "plain decoding is one of the choices"


def test_a_difference_from_plain_decoding_is_said() -> None:
    assert "NO" not in markdown(near_only())
    wrong = cell(1024, "self", window=512, length=4).model_copy(update={"identical": False})
    text = markdown(result().model_copy(update={"cells": (wrong,)}))
    assert "| NO |" in text
    assert "wrote another token" in text


def test_the_screen_shows_every_way_of_every_point() -> None:
    console = Console(record=True, file=io.StringIO(), width=80)
    show(result(), console)
    text = console.export_text()
    assert text.count("self w512 x4") == 12
    assert text.count("32,768 tokens, temperature 1, KV 3,019.9 MB, timing only") == 1


def test_plots_are_drawn_for_each_temperature(tmp_path: Path) -> None:
    written = draw_plots(result(), tmp_path / "new" / "plots")
    assert {path.name for path in written} == {f"{name}-t{t}.png" for name in PLOTS for t in (0, 1)}
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 4_000 < path.stat().st_size < 200_000
    only = draw_plots(near_only().model_copy(update={"cells": near_only().cells[:7]}), tmp_path)
    assert {path.name for path in only} == {f"{name}.png" for name in PLOTS}


def test_a_plot_has_a_line_for_each_way() -> None:
    cells = [each for each in result().cells if each.temperature == 0]
    figure = PLOTS["speedup"](cells)
    labels = [[line.get_label() for line in axes.get_lines()][:-1] for axes in figure.axes]
    assert labels == [["self w256", "self w512", "self-full", "ngram"]] * 2  # the last line is that of plain decoding
    w512 = figure.axes[0].get_lines()[1]
    assert np.asarray(w512.get_ydata()) == pytest.approx([1.4375, 1.4375, 1.5], abs=1e-3)
    drafts = PLOTS["draft-time"](cells).axes[1].get_lines()
    assert [line.get_label() for line in drafts] == ["plain step", "self w256", "self w512", "self-full"]
    assert np.asarray(drafts[1].get_ydata())[0] == pytest.approx(
        60.0
    )  # 1.2 s for 2 x 10 rounds of 4 sequences x 1 token


def test_plots_without_matplotlib_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plots()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'magicdec\[bench\]'"):
        check_plots()


def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        draw_plots(result(), tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(result(), tmp_path / "missing" / "bench.json")
