"""TrtllmRunner on the stand-in against TorchRunner, pass by pass; and faults planted in it, which must all be seen."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.runners.trtllm import inputs as trtllm_inputs
from magicdec.runtime.runners.trtllm import runner as trtllm_runner
from magicdec.runtime.runners.trtllm import session as trtllm_session
from magicdec.runtime.runners.trtllm.memory import Memory, Staging
from magicdec.runtime.runners.trtllm.pool import KVPool
from magicdec.runtime.runners.trtllm.runner import TrtllmRunner
from magicdec.runtime.runners.trtllm.session import TrtSession
from tests.support.engines import BLOCK, tiny_pair
from tests.support.faults import plant
from tests.support.trtllm import StandinMemory, compile_pair, standin

NUM_BLOCKS = 24


@pytest.fixture(autouse=True, scope="module")
def _standin() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with standin():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair(_standin: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trtllm")
    return compile_pair(tiny_pair(directory, "in_cache"), directory / "compiled")


class Both:
    """The same passes on both runners; logits and the whole cache must agree after each."""

    def __init__(self, engine_dir: Path, *, device_logits: bool = False) -> None:
        self.trt = TrtllmRunner(engine_dir, NUM_BLOCKS, BLOCK, "cpu", device_logits=device_logits)
        self.torch = TorchRunner(engine_dir, NUM_BLOCKS, BLOCK)
        self.torch.cache.keys.zero_()
        self.torch.cache.values.zero_()

    def forward(self, *sequences: SequenceInput) -> torch.Tensor:
        inputs = pack(sequences)
        logits = self.trt.forward(inputs)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, self.torch.forward(inputs), atol=2e-5, rtol=1e-5)
        self.check_cache()
        return logits

    def move_keys(self, slots: list[int], before: list[int], after: list[int]) -> None:
        for runner in (self.trt, self.torch):
            runner.write_keys(slots, after, runner.read_keys(slots, before))
        self.check_cache()

    def check_cache(self) -> None:
        layers, heads, size = 2, self.trt.cache.tensor.shape[3], self.trt.cache.tensor.shape[5]
        for kv, expected in enumerate((self.torch.cache.keys, self.torch.cache.values)):
            pool = self.trt.cache.tensor[:, :, kv].permute(1, 2, 0, 3, 4)  # [layers, heads, blocks, offset, size]
            torch.testing.assert_close(
                pool.reshape(layers, heads, NUM_BLOCKS * BLOCK, size), expected, atol=2e-5, rtol=1e-5
            )


TOKENS = [3 + index * 37 % 120 for index in range(200)]


def rows(first: int, count: int, table: list[int], num_logits: int, evicted: int = 0) -> SequenceInput:
    """Rows of one text at view entries first, first + 1, ...; `evicted` tokens before them are not in the view."""
    entries = range(first, first + count)
    return SequenceInput(
        token_ids=[TOKENS[evicted + entry] for entry in entries],
        positions=[evicted + entry for entry in entries],
        cache_len=first,
        block_table=table,
        slot_mapping=[table[entry // BLOCK] * BLOCK + entry % BLOCK for entry in entries],
        num_logits=num_logits,
    )


def run_target(engine_dir: Path, *, device_logits: bool = False) -> None:
    """Chunks, verification, rewinds, bounded views, all mixed in one batch."""
    both = Both(engine_dir, device_logits=device_logits)
    a, b, c = [7, 2, 9, 4, 11], [3, 12, 1], [15, 20]
    both.forward(rows(0, 40, a, 0), rows(0, 5, b, 1))  # a's first chunk wants no logits
    both.forward(rows(5, 1, b, 1), rows(40, 30, a, 1))  # b decodes before a's last chunk
    both.forward(rows(6, 5, b, 5), rows(70, 1, a, 1), rows(0, 17, c, 0))  # b verifies four drafts
    both.forward(rows(71, 4, a, 4), rows(8, 9, b, 9), rows(17, 1, c, 1))  # b took two, the others are overwritten
    window = [7, 4, 11]  # a's sinks and its last blocks: 32 tokens are not seen
    both.forward(rows(75 - 32, 1, window, 1, evicted=32), rows(17, 1, b, 1))
    both.forward(rows(76 - 32, 1, window, 1, evicted=32))
    both.forward(rows(75, 3, a, 3), rows(18, 2, c, 2), rows(0, 1, [5], 1), rows(18, 1, b, 1))


def run_draft(engine_dir: Path) -> None:
    """A bounded prompt, drafts one by one, catching up, and sinks that follow the window."""
    both = Both(engine_dir)
    sinks, recent = [6], [8, 1, 10]
    both.forward(rows(0, 60, sinks + recent, 1), rows(0, 20, [14, 15], 1))
    for at in range(60, 64):
        both.forward(rows(at, 1, sinks + recent, 1), rows(at - 40, 1, [14, 15], 1))
    slots = [6 * BLOCK + offset for offset in range(BLOCK)]
    recent = [*recent[1:], recent[0]]  # the oldest block becomes the newest
    both.move_keys(slots, list(range(BLOCK)), list(range(BLOCK, 2 * BLOCK)))
    both.forward(rows(48, 3, sinks + recent, 1, evicted=BLOCK))  # catches up by three tokens
    both.forward(rows(50, 1, sinks + recent, 1, evicted=BLOCK), rows(24, 2, [14, 15], 1))


@pytest.mark.parametrize("device_logits", [False, True])
def test_target_passes(pair: Path, device_logits: bool) -> None:
    run_target(pair / "target", device_logits=device_logits)


def test_draft_passes(pair: Path) -> None:
    run_draft(pair / "draft")


def test_a_pass_beyond_the_engines_limits_is_cut(pair: Path) -> None:
    """As when several drafts read their prompts at once: 190 rows and 5 sequences, the engine takes 128 and 4."""
    both = Both(pair / "draft")
    assert both.trt.limits.max_num_tokens == 128
    assert both.trt.limits.max_batch_size == 4
    tables = [[4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3] for index in range(5)]
    logits = both.forward(*(rows(0, 38, table, 1) for table in tables))
    assert logits.shape == (5, both.trt.vocab_size)
    both.forward(*(rows(38 - index, 1 + index, table, 1) for index, table in enumerate(tables)))


def test_nothing_is_allocated_after_the_start(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK, "cpu")
    before = list(runner.memory.allocations)
    for name in ("device", "host"):
        monkeypatch.setattr(Memory, name, None)
    first = runner.forward(pack([rows(0, 9, [1], 9)]))
    second = runner.forward(pack([rows(0, 9, [1], 9)]))
    assert runner.memory.allocations == before
    assert first.data_ptr() != second.data_ptr(), "what the last pass returned may still be in use"
    assert runner.kv_bytes == runner.cache.tensor.nbytes


def test_logits_stay_on_the_device_for_acceptance_there(pair: Path) -> None:
    """Two buffers, so that a pass may be issued while the last one's logits are still read."""
    runner = TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK, "cpu", device_logits=True)
    inputs = pack([rows(5, 1, [1], 1), rows(0, 5, [2], 3)])
    result = runner.execute(inputs)
    assert result.rows.tolist() == [3, 0, 1, 2]
    kept = result.logits[result.rows, : runner.vocab_size].clone()
    left = runner.forward(inputs)
    assert torch.equal(kept, left)
    assert any(
        start <= left.data_ptr() < start + size for start, size, at in runner.memory.allocations if at == "device"
    )
    runner.forward(pack([rows(0, 9, [1], 9)]))
    assert torch.equal(kept, left), "the next pass writes elsewhere"


def test_an_engine_for_another_runtime_is_refused(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = trtllm_runner._STEP_INPUTS - {"position_ids"}
    monkeypatch.setattr(trtllm_runner, "_STEP_INPUTS", inputs)
    with pytest.raises(EngineError, match=r"unknown \['position_ids'\], missing \[\]"):
        TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK, "cpu")


def test_another_block_size_is_refused(pair: Path) -> None:
    with pytest.raises(EngineError, match="compiled for blocks of 16 tokens, and 32 are asked for"):
        TrtllmRunner(pair / "target", NUM_BLOCKS, 32, "cpu")


def test_a_damaged_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.engine"
    path.write_bytes(b"TRT")
    with pytest.raises(EngineError, match=r"rank0\.engine is no engine for this machine"):
        TrtSession(path, StandinMemory())
    with pytest.raises(EngineError, match=r"rank1\.engine cannot be read"):
        TrtSession(tmp_path / "rank1.engine", StandinMemory())


def test_without_a_gpu_the_user_is_told(pair: Path) -> None:
    assert not torch.cuda.is_available(), "this test is for machines without"
    with pytest.raises(EngineError, match="needs an NVIDIA GPU, and PyTorch sees none"):
        TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK)


def test_without_tensorrt_llm_the_user_is_told(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(EngineError, match=r"compiled by TensorRT-LLM.*tensorrt-llm==1\.2\.1"):
        TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK, "cpu")


def test_the_tightest_profile_is_chosen(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 tokens and up to 128; switched only when the other one is better."""
    session, chosen = TrtllmRunner(pair / "target", NUM_BLOCKS, BLOCK, "cpu").session, []
    assert [profile["input_ids"] for profile in session.profiles] == [((1,), (64,)), ((64,), (128,))]
    monkeypatch.setattr(session._context, "set_optimization_profile_async", lambda index, _stream: chosen.append(index))
    for count in (5, 64, 65, 128, 3):
        session._select({"input_ids": (count,)})
    assert chosen == [0, 1, 0]
    with pytest.raises(EngineError, match=r"no optimisation profile of .* takes this step: input_ids \(129,\)"):
        session._select({"input_ids": (129,), "sequence_length": (1,)})


@dataclass(frozen=True)
class Fault:
    """In `function` of `owner`, `old` becomes `new`; the passes must notice."""

    owner: type | ModuleType
    function: str
    old: str
    new: str
    role: str = "target"


FAULTS = {
    "generations before contexts": Fault(
        trtllm_inputs, "step_tensors", "stable=True)", "stable=True, descending=True)"
    ),
    "host_past_key_value_lengths off by one": Fault(
        trtllm_inputs, "step_tensors", "totals - 1, totals)", "totals, totals)"
    ),
    "past lengths of contexts without the step": Fault(
        trtllm_inputs, "step_tensors", "totals - 1, totals)", "totals - 1, past)"
    ),
    "sequence_length without the step": Fault(
        trtllm_inputs, "step_tensors", '"sequence_length": totals', '"sequence_length": past'
    ),
    "a context's length is its total": Fault(trtllm_inputs, "step_tensors", "past, lengths)", "past, totals)"),
    "lengths in the caller's order": Fault(
        trtllm_inputs, "step_tensors", "lengths[order], inputs.cache_lens[order]", "lengths[order], inputs.cache_lens"
    ),
    "positions in the caller's order": Fault(
        trtllm_inputs, "step_tensors", "inputs.positions[rows]", "inputs.positions"
    ),
    "positions from the lengths": Fault(
        trtllm_inputs,
        "step_tensors",
        '"position_ids": inputs.positions[rows]',
        '"position_ids": torch.cat([torch.arange(p, t) for p, t in zip(past, totals)])',
    ),
    "block tables in the caller's order": Fault(
        trtllm_inputs, "step_tensors", "inputs.block_table[order]", "inputs.block_table"
    ),
    "keys and values swapped": Fault(trtllm_inputs, "_block_offsets", "[keys + 0, keys + 1]", "[keys + 1, keys + 0]"),
    "offsets of another layout": Fault(trtllm_inputs, "_block_offsets", "limits.num_layers * 2", "2"),
    "last_token_ids count from zero": Fault(
        trtllm_inputs, "_last_token_ids", "packed.nonzero().flatten() + 1", "packed.nonzero().flatten()"
    ),
    "last_token_ids name the last row": Fault(
        trtllm_inputs,
        "_last_token_ids",
        "packed.nonzero().flatten() + 1",
        "torch.full((int(packed.sum()),), len(rows))",
    ),
    "logits in the engine's order": Fault(
        trtllm_inputs, "_last_token_ids", "place[inputs.logits_indices]", "place[inputs.logits_indices].sort().values"
    ),
    "a chunk's row of logits is not dropped": Fault(
        trtllm_inputs, "_last_token_ids", "place[inputs.logits_indices]", "torch.arange(len(inputs.logits_indices))"
    ),
    "stale sink keys": Fault(
        TrtllmRunner, "write_keys", "self.cache.write_keys(slots, positions, keys)", "pass", "draft"
    ),
    "sink keys at their old position": Fault(
        KVPool, "write_keys", "where, back=False", "where * 0, back=False", "draft"
    ),
    "sink keys rotated twice": Fault(KVPool, "read_keys", "where, back=True", "where * 0, back=True", "draft"),
    "sink values rewritten as well": Fault(
        KVPool, "write_keys", "[blocks, :, 0, :, offsets]", "[blocks, :, 1, :, offsets]", "draft"
    ),
    "the last step's tensors once more": Fault(
        Staging, "upload", "self._device[: self._used].copy_", "self._device[: self._used].clone().copy_"
    ),
    "logits of the pass before": Fault(
        TrtllmRunner, "_deliver", "result.logits[first : first + count]", "home[:count]"
    ),
    "device memory for a host tensor": Fault(
        TrtllmRunner, "execute", 'host if name.startswith("host_") else device', "device"
    ),
    "host memory for a device tensor": Fault(
        TrtllmRunner, "execute", 'host if name.startswith("host_") else device', "host"
    ),
    "a pool of another shape": Fault(
        trtllm_runner, "_pool", 'head_size=config["head_size"]', 'head_size=config["head_size"] // 2'
    ),
    "the sinks of the plugin": Fault(
        trtllm_inputs, "constant_tensors", "torch.zeros(1, dtype=torch.int32)", "torch.ones(1, dtype=torch.int32)"
    ),
    "a window that hides the past": Fault(
        trtllm_inputs, "constant_tensors", "torch.full((layers,), limits.max_seq_len", "torch.full((layers,), 8"
    ),
    "layers in reverse": Fault(trtllm_inputs, "constant_tensors", "[0, layer]", "[0, layers - 1 - layer]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    # the runner imports some functions by name
    plant(monkeypatch, fault.owner, fault.function, fault.old, fault.new, trtllm_runner)
    seen = (AssertionError, EngineError, import_module("tensorrt").StandinError)
    with pytest.raises(seen):
        (run_target if fault.role == "target" else run_draft)(pair / fault.role)


def test_the_version_that_is_asked_for_is_the_pinned_one() -> None:
    assert import_module("tensorrt_llm").__version__ == trtllm_session.TRTLLM_VERSION
