"""`magicdec bench` on a tiny pair: a whole run, filled contexts, and what it refuses."""

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from magicdec import LLM, SamplingParams
from magicdec.bench.drafters import draft_kv_bytes, make_proposer
from magicdec.bench.grid import Way, available_drafters
from magicdec.bench.prompts import fill_prompts
from magicdec.bench.result import Cell, load
from magicdec.builder import calibrate
from magicdec.builder.build import build_pair
from magicdec.cli import app
from magicdec.pair.config import DraftConfig, PairConfig
from magicdec.pair.manifest import load_pair
from magicdec.runtime.drafting.model_proposer import ModelProposer
from tests.support.engines import tiny_pair
from tests.support.tiny_models import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "there in the one and on the other are the rest then, and 1 or 2 of them has no end; "


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on 160 positions, built for 512."""
    directory = tmp_path_factory.mktemp("bench")
    checkpoint = write_tiny_checkpoint(directory / "hf", max_position_embeddings=160)
    config = PairConfig(
        name="tiny",
        target="random",
        draft=DraftConfig(kind="self", window_size=32, max_draft_len=4),
        dtype="float32",
        max_seq_len=512,
        max_num_tokens=128,
        beyond_trained_len=True,
    )
    return build_pair(checkpoint, "self", config, directory / "pair")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} {TEXT}" for number in range(40)))
    return path


def run(*args: object) -> Result:
    wide = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["bench", *(str(arg) for arg in args)], env=wide)


def fail(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    return result.output


def test_a_whole_benchmark(engine: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    grid = ["--context", 96, "--context", 200, "--batch", 2, "--window", 32, "--draft-length", 2]
    short = ["--output-tokens", 6, "--repeats", 2, "--text-file", text]
    done = run("--engine", engine, *grid, *short, "--json", file, "--plots", tmp_path / "plots")
    assert done.exit_code == 0, done.output
    assert "timing only" in done.output
    assert "about 0 min" in done.output
    assert len(list((tmp_path / "plots").glob("*.png"))) == 4
    result = load(file)
    names = ["none", "self w32 x2", "self-full x2", "ngram x2", "auto w32"]
    assert [cell.name for cell in result.cells] == names * 2
    near, far = result.cells[:5], result.cells[5:]
    _check_near(near)
    assert [cell.beyond_trained_len for cell in near + far] == [False] * 5 + [True] * 5
    assert [cell.projected_from for cell in far] == [None, 96, 96, 96, None]
    _check_projection(near[1], far[1], far[0])
    assert [(each.filled, each.tokens_per_second is None) for each in result.prefill] == [(False, False), (True, True)]
    assert not result.skipped
    assert (result.settings.output_tokens, result.settings.repeats) == (6, 2)
    again = run("plot", file, "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert len(list((tmp_path / "again").glob("*.png"))) == 4


def _check_near(cells: tuple[Cell, ...]) -> None:
    plain, windowed, full, ngram, auto = cells
    assert all(cell.identical for cell in cells)  # float32
    assert [len(cell.runs) for cell in cells] == [4, 2, 2, 2, 2]  # plain decoding ran in two groups of each repeat
    assert plain.summary.acceptance_length == 1
    assert full.summary.acceptance_rate == 1  # it sees what the target sees
    assert full.summary.acceptance_length == 3
    assert windowed.summary.acceptance_rate is not None
    assert windowed.summary.acceptance_rate < 1
    assert all(run.drafted == 2 * 2 * run.steps for cell in (windowed, full) for run in cell.runs)
    assert ngram.draft_kv_bytes == windowed.draft_kv_bytes == 0
    assert plain.target_kv_bytes == 2 * 96 * 256  # 2 layers x keys and values x 2 heads x 8 numbers x 4 bytes
    assert windowed.summary.draft_ms > 0
    assert (auto.draft_length, auto.window) == (None, 32)
    assert plain.summary.draft_ms < plain.summary.verify_ms


def _check_projection(near: Cell, far: Cell, plain: Cell) -> None:
    assert far.projected_speedup == pytest.approx(
        near.summary.acceptance_length * plain.summary.step_ms / far.summary.step_ms
    )
    assert far.speedup == far.projected_speedup


def test_at_temperature_1_no_one_asks_for_equal_tokens(engine: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    one = ["--context", 96, "--batch", 1, "--drafter", "self", "--window", 32, "--draft-length", 2, "--repeats", 1]
    done = run("--engine", engine, *one, "--temperature", 1, "--output-tokens", 4, "--text-file", text, "--json", file)
    assert done.exit_code == 0, done.output
    assert [cell.identical for cell in load(file).cells] == [None, None]


def test_what_the_time_does_not_allow_is_named(engine: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    args = ["--context", 96, "--batch", 1, "--draft-length", 2, "--max-minutes", 0, "--text-file", text, "--json", file]
    done = run("--engine", engine, *args)
    assert done.exit_code == 0, done.output
    assert "will leave the last ones out" in done.output
    assert "Left out: 1 x 96 tokens, T=0 (time limit)" in done.output
    assert load(file).cells == ()


def test_a_separate_draft_can_be_measured(tmp_path: Path, text: Path) -> None:
    pair, file = tiny_pair(tmp_path, "in_cache"), tmp_path / "bench.json"
    one = ["--context", 96, "--batch", 1, "--drafter", "draft", "--draft-length", 2, "--repeats", 1]
    done = run("--engine", pair, *one, "--output-tokens", 6, "--text-file", text, "--json", file)
    assert done.exit_code == 0, done.output
    plain, draft = load(file).cells
    assert draft.name == "draft w32 x2"
    assert draft.draft_kv_bytes > 0
    assert draft.identical
    assert draft.runs[0].drafted == 2 * draft.runs[0].steps
    assert plain.draft_kv_bytes == 0


def test_a_cache_filled_from_the_prompt_itself_is_that_of_reading_it(engine: Path) -> None:
    prompt, params = [5 + i * i % 90 for i in range(128)], SamplingParams(temperature=0, max_tokens=12)
    read = LLM(engine, max_batch_size=2).generate([prompt], params)[0].outputs[0].token_ids
    llm = LLM(engine, max_batch_size=2, kv_cache_tokens=1024)
    llm.generate([[*prompt, 9]], params.model_copy(update={"max_tokens": 1}))
    other = [7, *prompt[1:]]
    fill_prompts(llm, prompt, [other])
    output = llm.generate([other], params)[0]
    assert output.metrics.num_cached_tokens == 112  # all but the last block, which a row is needed of
    assert output.outputs[0].token_ids == read
    llm.engine.check_integrity()


def test_a_filled_prompt_repeats_its_source(engine: Path) -> None:
    llm = LLM(engine, max_batch_size=2, kv_cache_tokens=2048)
    source = [5 + i % 90 for i in range(64)]
    llm.generate([[*source, 9]], SamplingParams(temperature=0, max_tokens=1))
    prompts = [[first, *range(6, 106), *range(6, 106)] for first in (5, 6)]
    before = llm.engine.blocks.num_free_blocks
    fill_prompts(llm, source, prompts)
    assert llm.engine.blocks.num_free_blocks == before
    tables = []
    for name, prompt in zip("ab", prompts, strict=True):
        assert llm.engine.blocks.allocate(name, prompt, len(prompt)) == 192
        tables.append(list(llm.engine.blocks.table(name))[:12])
    assert not set(tables[0]) & set(tables[1])  # bytes of their own, so that reading them costs what it costs
    keys = llm.runner.cache.keys  # type: ignore[attr-defined]
    for table in tables:
        blocks = [keys[:, :, block * 16 : block * 16 + 16] for block in table]
        assert all(torch.equal(blocks[i], blocks[i % 4]) for i in range(12))
        assert not torch.equal(blocks[0], blocks[1])


def test_refusals(engine: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["--engine", engine, "--text-file", text, "--json", tmp_path / "bench.json", "--batch", 1, "--context", 96]
    assert "--drafter draft cannot be measured with this pair" in fail(*base, "--drafter", "draft")
    assert "--drafter tree cannot be measured" in fail(*base, "--drafter", "tree")
    assert "--window 40 is not a multiple of the pair's block size 16" in fail(*base, "--window", 40)
    assert "--draft-length 9 is not within 1 and the pair's max_draft_len 4" in fail(*base, "--draft-length", 9)
    assert "was built with max_seq_len 512; lower --context" in fail(*base, "--context", 500)
    assert "is a directory, or its directory does not exist" in fail(*base, "--json", tmp_path / "no" / "b.json")
    assert "no result of magicdec bench" in fail("plot", text, "--output", tmp_path)
    (tmp_path / "short.txt").write_text(TEXT)
    assert "too few for 1 different prompts" in fail(*base, "--text-file", tmp_path / "short.txt", "--context", 300)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'magicdec[bench]'" in fail(*base, "--plots", tmp_path / "plots")
    assert not (tmp_path / "bench.json").exists()


def test_a_cache_that_memory_cannot_hold_is_refused(
    engine: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicdec.pair.memory.free_memory", lambda: 10_000)
    args = ["--engine", engine, "--text-file", text, "--json", tmp_path / "bench.json", "--batch", 1, "--context", 96]
    assert "1 x 96 tokens need" in fail(*args)


def test_drafts_in_fewer_bits_have_a_runner_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 512)
    pair = tiny_pair(tmp_path, "self", weight_only="int4", intermediate_size=64)
    assert available_drafters(load_pair(pair).config) == ["self", "self-int4", "self-full", "ngram", "auto"]
    llm = LLM(pair)
    narrow, wide = (make_proposer(llm, Way(drafter, 64, 2)) for drafter in ("self-int4", "self"))
    assert isinstance(narrow, ModelProposer)
    assert isinstance(wide, ModelProposer)
    assert narrow.runner is llm.draft_runner is not None
    assert wide.runner is llm.runner
    assert draft_kv_bytes(llm, Way("self-int4", 64, 2), 4) == 0
