"""The native model: as exact as PyTorch in the same dtype, and row by row the same bits in any pass."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from magicdec.errors import EngineError
from magicdec.plugins.cpu.library import ISAS, best_isa, native, set_isa
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.plugins.model.native_model import NativeModel, obstacle
from magicdec.plugins.model.torch_model import ModelConfig, TorchModel
from magicdec.runtime.runners import torch_runner
from magicdec.runtime.runners.torch_runner import TorchRunner
from tests.support.engines import tiny_pair

BLOCK, NUM_BLOCKS = 16, 24
TABLES = ([5, 2, 9, 1, 7, 12, 3], [20, 4, 11, 6, 15, 14, 8])  # of two sequences
TOKENS = torch.randint(3, 128, (2, 100), generator=torch.Generator().manual_seed(3)).tolist()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Chunks = list[list[tuple[int, int]]]  # passes; each adds rows to sequences: (sequence, rows)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pairs"), "self", family=request.param, hidden_size=80) / "target"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pairs"), "self", fp8=True) / "target"


def runner(engine: Path, dtype: torch.dtype) -> TorchRunner:
    opened = TorchRunner(engine, NUM_BLOCKS, BLOCK, dtype)
    if not isinstance(opened.model, NativeModel):
        pytest.skip("the native library was not built")
    opened.cache.keys.view(torch.uint8).zero_()
    opened.cache.values.view(torch.uint8).zero_()
    return opened


def reference(engine: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> TorchRunner:
    """The same engine on PyTorch's kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_runner, "native", lambda: None)
        return TorchRunner(engine, NUM_BLOCKS, BLOCK, dtype)


def run(opened: TorchRunner, passes: Chunks) -> torch.Tensor:
    """Logits [2, 100, vocab] of both sequences, computed in these passes."""
    logits = torch.full((2, 100, opened.vocab_size), torch.nan, dtype=torch.float64)
    done = [0, 0]
    for rows in passes:
        inputs = []
        for sequence, count in rows:
            start = done[sequence]
            positions = range(start, start + count)
            inputs.append(
                SequenceInput(
                    token_ids=TOKENS[sequence][start : start + count],
                    positions=positions,
                    cache_len=start,
                    block_table=TABLES[sequence],
                    slot_mapping=[TABLES[sequence][p // BLOCK] * BLOCK + p % BLOCK for p in positions],
                    num_logits=count,
                )
            )
        parts = torch.split(opened.forward(pack(inputs)), [count for _, count in rows])
        for (sequence, count), part in zip(rows, parts, strict=True):
            logits[sequence, done[sequence] : done[sequence] + count] = part
            done[sequence] += count
    return logits


WHOLE: Chunks = [[(0, 100)], [(1, 100)]]
SINGLE: Chunks = [[(0, 80)], [(1, 80)], *([(0, 1)] for _ in range(20)), *([(1, 1)] for _ in range(20))]
TOGETHER: Chunks = [[(0, 80), (1, 80)], *([(0, 1), (1, 1)] for _ in range(20))]
VERIFIED: Chunks = [[(0, 80), (1, 80)], *([(0, 5), (1, 5)] for _ in range(4))]
MIXED: Chunks = [[(0, 33)], [(0, 17), (1, 40)], [(0, 1), (1, 60)], [(0, 49)]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_as_exact_as_pytorch(engine: Path, isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native()
    exact = run(reference(engine, torch.float64, monkeypatch), MIXED)
    same = run(reference(engine, dtype, monkeypatch), MIXED)
    opened = runner(engine, dtype)
    assert library is not None
    best = best_isa(library)
    try:
        set_isa(library, isa)
        result = run(opened, MIXED)
    except EngineError:
        pytest.skip(f"no {isa} here")
    finally:
        set_isa(library, best)
    assert (result - exact).square().mean() <= 4 * (same - exact).square().mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_in_any_pass(engine: Path, dtype: torch.dtype) -> None:
    opened = runner(engine, dtype)
    expected = run(opened, SINGLE)
    keys, values = opened.cache.keys.clone(), opened.cache.values.clone()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for passes in (WHOLE, SINGLE, TOGETHER, VERIFIED, MIXED):
            opened.cache.keys.zero_()
            opened.cache.values.zero_()
            assert torch.equal(run(opened, passes)[:, 80:], expected[:, 80:])
            assert torch.equal(opened.cache.keys, keys)
            assert torch.equal(opened.cache.values, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_few_bits(
    tmp_path_factory: pytest.TempPathFactory, bits: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a draft; what they stand for is not rounded to the model's dtype, as it is on PyTorch."""
    directory = tmp_path_factory.mktemp("pairs")
    pair = tiny_pair(directory, "self", weight_only=bits, hidden_size=64, intermediate_size=96)  # type: ignore[arg-type]
    opened = runner(pair / "draft", dtype)
    result = run(opened, MIXED)
    exact = run(reference(pair / "draft", torch.float64, monkeypatch), MIXED)
    same = run(reference(pair / "draft", dtype, monkeypatch), MIXED)
    assert (result - exact).square().mean() <= 4 * (same - exact).square().mean()
    for passes in (WHOLE, SINGLE, VERIFIED):
        assert torch.equal(run(opened, passes)[:, 80:], result[:, 80:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8(fp8: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, same = runner(fp8, dtype), reference(fp8, dtype, monkeypatch)
    result, expected = run(opened, MIXED), run(same, MIXED)
    exact = run(reference(fp8, torch.float64, monkeypatch), MIXED)
    assert (result - exact).square().mean() <= 4 * (expected - exact).square().mean()
    assert torch.equal(run(opened, VERIFIED), result)


def test_a_pass_outside_the_pool_is_refused(engine: Path) -> None:
    opened = runner(engine, torch.float32)
    good = {
        "token_ids": [3],
        "positions": [0],
        "cache_len": 0,
        "block_table": [1],
        "slot_mapping": [16],
        "num_logits": 1,
    }
    for bad in ({"token_ids": [128]}, {"block_table": [NUM_BLOCKS]}, {"slot_mapping": [-1]}, {"positions": [-1]}):
        with pytest.raises(IndexError):
            opened.forward(pack([SequenceInput(**(good | bad))]))  # type: ignore[arg-type]


def test_weights_are_held_once(engine: Path) -> None:
    library = native()
    if library is None:
        pytest.skip("the native library was not built")
    config = ModelConfig.from_checkpoint(json.loads((engine / "config.json").read_text()))
    weights = load_file(engine / "rank0.safetensors")
    assert obstacle(config, weights) is None
    NativeModel(library, config, weights)
    assert not weights


def test_what_cannot_run_natively_runs_on_pytorch_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if native() is None:
        pytest.skip("the native library was not built")
    pair = tiny_pair(tmp_path, "self", head_dim=1032, hidden_size=32, num_layers=1)
    assert isinstance(TorchRunner(pair / "target", NUM_BLOCKS, BLOCK).model, TorchModel)
    assert "heads of size 1032" in caplog.text
    caplog.clear()
    assert isinstance(TorchRunner(pair / "target", NUM_BLOCKS, BLOCK, torch.float64).model, TorchModel)
    assert not caplog.text
