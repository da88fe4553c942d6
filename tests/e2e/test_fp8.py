"""Whole runs in FP8: speculation changes nothing, the KV pool takes one byte an element, sinks move with the window."""

import re
from pathlib import Path

import pytest
import torch

from magicdec.builder import calibrate
from magicdec.commands.inspect import inspect
from magicdec.errors import ConfigError
from magicdec.pair.manifest import load_pair
from magicdec.pair.memory import plan_memory
from magicdec.plugins.hadamard import Hadamard
from magicdec.runtime.llm import LLM
from magicdec.runtime.runners.torch_runner import TorchRunner
from tests.e2e.test_exactness import PARAMS, PROMPTS, accepted, assert_same
from tests.support.engines import DRAFTERS, Drafter, tiny_pair


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model has seen everything soon."""
    monkeypatch.setattr(calibrate, "CALIBRATION_TOKENS", 1024)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_is_that_of_plain_decoding(directory: Path, drafter: Drafter) -> None:
    """Seeded (coupled) and greedy; in float64 FP8 products are exact, so that FP8 rounding meets the same numbers."""
    engine = tiny_pair(directory, drafter, fp8=True)
    plain = LLM(engine, dtype="float64", num_draft_tokens=0, max_batch_size=1, max_num_tokens=1024)
    expected = [plain.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    llm = LLM(engine, dtype="float64", num_draft_tokens=4, kv_cache_tokens=512, max_num_tokens=40)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    assert_same(outputs, expected)
    if drafter != "ngram":
        assert accepted(outputs) > 50


def test_pools_take_one_byte_an_element(directory: Path) -> None:
    engine = tiny_pair(directory, "in_cache", fp8=True)
    llm = LLM(engine, kv_cache_tokens=256)
    assert isinstance(llm.runner, TorchRunner)
    pool = llm.runner.cache
    assert pool.keys.element_size() == pool.values.element_size() == 1
    assert pool.keys.untyped_storage().nbytes() == pool.keys.numel() == 2 * 2 * 256 * 8  # layers, heads, slots, head
    memory, config = llm.memory(), load_pair(engine).config
    assert memory["target_kv_bytes"] == 2 * pool.keys.numel()
    assert memory["target_kv_bytes_per_token"] == 2 * 2 * 2 * 8
    assert memory["draft_kv_bytes_per_request"] == config.draft_budget * 2 * 2 * 2 * 8
    plan = plan_memory(engine, config, context=256, batch_size=1)
    assert (plan.target_kv, plan.draft_kv) == (memory["target_kv_bytes"], memory["draft_kv_bytes_per_request"])


def test_inspect_tells_the_formats_and_true_bytes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = tiny_pair(directory, "in_cache", fp8=True)
    inspect(engine, context=256, batch=1, verify=False, as_json=False)
    text = capsys.readouterr().out
    assert text.count("FP8 (E4M3)") == 4
    assert len(re.findall(r"[^,\d]64 bytes", text)) == 2


def test_sink_keys_are_rewritten_in_fp8(directory: Path) -> None:
    """Read free of their positions, turned elsewhere and back, they are the same but for one rounding to E4M3."""
    engine = tiny_pair(directory, "in_cache", fp8=True)
    runner = TorchRunner(engine / "draft", num_blocks=2, block_size=16)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 16, 8, generator=generator)
    slots, first, moved = list(range(16, 32)), list(range(16)), list(range(48, 64))
    runner.write_keys(slots, first, keys)
    assert runner.cache.keys.dtype == torch.float8_e4m3fn
    free = runner.read_keys(slots, first)
    # Half a step of E4M3 relative, or half of its smallest step, in each of the eight numbers that a turn mixes.
    largest = (keys**2).sum(-1, keepdim=True).sqrt()
    assert (free - keys).abs().max() > 0
    assert ((free - keys).abs() <= largest / 16).all()
    scales = torch.tensor(runner.cache.fp8_scales).view(2, 1, 1, 1)
    runner.write_keys(slots, moved, free)
    stored = runner.cache.keys[:, :, 16:32].float() * scales
    expected = Hadamard(8, torch.float32).keys(runner._turn(free, moved, back=False))
    assert ((stored - expected).abs() <= expected.abs() / 16 + scales * 2.0**-10).all()
    assert ((runner.read_keys(slots, moved) - free).abs() <= largest / 16).all()


def test_an_fp8_draft_of_a_full_precision_target(directory: Path) -> None:
    """Separate switches: only the draft is FP8; the output is the full-precision target's."""
    from magicdec.builder.build import build_pair
    from magicdec.pair.config import PairConfig

    base = tiny_pair(directory, "in_cache")
    values = load_pair(base).config.model_dump()
    values["quantization"]["draft"] = "fp8"
    config = PairConfig.model_validate(values)
    engine = build_pair(directory / "target", directory / "target", config, directory / "fp8-draft")
    llm = LLM(engine, dtype="float64", num_draft_tokens=3)
    outputs = llm.generate(PROMPTS, PARAMS)
    plain = LLM(base, dtype="float64", num_draft_tokens=0).generate(PROMPTS, PARAMS)
    assert_same(outputs, plain)
    assert 50 < accepted(outputs) < sum(out.metrics.num_draft_tokens for out in outputs)


def test_fp8_needs_a_gpu_that_has_it(directory: Path) -> None:
    from magicdec.builder.build import build_pair
    from magicdec.builder.config import resolve_config
    from magicdec.pair.config import PairConfig

    base = load_pair(tiny_pair(directory, "self")).config
    config = PairConfig.model_validate(base.model_dump() | {"gpu": "a100-80gb"})
    with pytest.raises(ConfigError, match=r"FP8 weights.*a100-80gb.*no FP8 arithmetic"):
        build_pair(
            directory / "target", "self", resolve_config(config, kind="self", quantize_target="fp8"), directory / "x"
        )
