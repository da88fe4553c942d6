"""`magicdec trtllm-check` on a machine without a GPU: its refusals, its statistics, its report."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chi2_contingency
from typer.testing import CliRunner

from magicdec import gpu_checks
from magicdec.builder.build import build_pair
from magicdec.cli import app
from magicdec.errors import EngineError
from magicdec.gpu_checks import Check, CheckPlan, chi_square_tail, describe_gpu, two_sample_chi_square
from magicdec.pair.config import PairConfig
from magicdec.pair.manifest import load_pair
from magicdec.runtime.engine import sampler
from magicdec.runtime.runners.trtllm.runner import TrtllmRunner
from magicdec.runtime.sampling import acceptance as rejection
from magicdec.tasks.trtllm_check import format_report, make_plan
from tests.support.engines import tiny_pair
from tests.support.trtllm import standin


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where it cannot be imported."""
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)


@pytest.mark.usefixtures("without_tensorrt")
def test_a_machine_without_tensorrt_llm_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    output = tmp_path / "report.md"
    result = CliRunner().invoke(app, ["trtllm-check", "--output", str(output), "--cache-dir", str(tmp_path / "cache")])
    assert result.exit_code == 2
    assert "tensorrt-llm==1.2.1" in result.output
    assert list(tmp_path.iterdir()) == []


def test_another_version_or_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trt = SimpleNamespace(__version__="10.14.1")
    monkeypatch.setattr(gpu_checks, "import_tensorrt", lambda: (SimpleNamespace(__version__="1.3.0"), trt))
    with pytest.raises(EngineError, match=r"TensorRT-LLM 1\.3\.0 is installed.*install tensorrt-llm==1\.2\.1"):
        describe_gpu()
    monkeypatch.setattr(gpu_checks, "import_tensorrt", lambda: (SimpleNamespace(__version__="1.2.1"), trt))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="PyTorch sees no NVIDIA GPU"):
        describe_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(EngineError, match=r"NVIDIA T4 is of compute capability 7\.5"):
        describe_gpu()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert ("GPU", "NVIDIA T4, compute capability 9.0") in describe_gpu()


@pytest.mark.parametrize("freedom", [2, 5, 20, 60])
def test_the_tail_of_chi_square(freedom: int) -> None:
    for p in (0.5, 0.05, 1e-3, 1e-5):
        statistic = float(chi2.isf(p, freedom))
        assert chi_square_tail(statistic, freedom) == pytest.approx(p)


def test_two_samples() -> None:
    first, second = Counter({"a": 40, "b": 55, "c": 5}), Counter({"a": 60, "b": 33, "d": 4, "e": 3})
    statistic, freedom = two_sample_chi_square(first, second)
    table = [[40, 55, 5], [60, 33, 7]]  # what is rare stands in one cell
    assert freedom == 2
    assert statistic == pytest.approx(chi2_contingency(table, correction=False).statistic)
    assert two_sample_chi_square(Counter({"a": 100}), Counter({"a": 100})) == (0, 0)


def test_the_plan_drafts_with_a_window_and_with_a_separate_model(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "model", "smollm2-135m-self", "float16", 512, tmp_path)
    assert {name: draft for name, (draft, _) in plan.pairs.items()} == {"self": "self", "model": tmp_path / "model"}
    for name, (_, config) in plan.pairs.items():
        assert (config.backend, config.dtype, config.draft.kind) == ("trtllm", "float16", name)
    assert plan.pairs["model"][1].draft.resolved_sink_positions == "in_cache"


def test_the_report(tmp_path: Path) -> None:
    plan = CheckPlan(tmp_path / "SmolLM2", {}, tmp_path, "text")
    checks = [Check("self: law", True, [("p", "0.4")]), Check("self: logits", False, [("EngineError", "a | b\nc")])]
    text = format_report([("GPU", "NVIDIA H100")], plan, checks)
    assert "1 of 2 checks passed. Model: SmolLM2" in text
    assert "| GPU | NVIDIA H100 |" in text
    assert "## self: law: passed" in text
    assert "## self: logits: FAILED" in text
    assert "| EngineError | a / b c |" in text


def test_a_check_that_raises_has_failed_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path / "model", "smollm2-135m-self", None, 512, tmp_path)

    def fail(*_args: object, **_options: object) -> None:
        raise EngineError("no room")

    monkeypatch.setattr(gpu_checks, "build_pair", fail)
    seen: list[str] = []
    checks = gpu_checks.run_checks(plan, seen.append)
    assert seen == ["self: build", "model: build"]  # what needs the engine is left out, the next pair is not
    assert [check.passed for check in checks] == [False, False]
    assert checks[0].rows[0][1].startswith("no room (test_trtllm_check.py:")


@pytest.fixture(scope="module")
def tiny_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckPlan]:
    """Tiny pairs in float32, built and executed by the stand-in."""
    directory = tmp_path_factory.mktemp("gpu-check")
    config = load_pair(tiny_pair(directory, "in_cache")).config.model_copy(update={"backend": "trtllm"})
    own = PairConfig.model_validate(config.model_dump() | {"draft": {"kind": "self", "window_size": 32}})
    pairs: dict[str, tuple[Path | str, PairConfig]] = {"self": ("self", own), "model": (directory / "draft", config)}
    with standin():
        yield CheckPlan(
            directory / "target",
            pairs,
            directory / "built",
            "the rest of the other one " * 40,
            device="cpu",
            context=120,
            max_tokens=16,
            num_samples=40,
            workers=0,
        )


def test_all_checks_on_the_stand_in(tiny_plan: CheckPlan) -> None:
    checks = gpu_checks.run_checks(tiny_plan, lambda _what: None)
    assert [check.name.split(": ")[1] for check in checks] == ["build", "logits", "equality", "law", "speed"] * 2
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]
    rows = {check.name: dict(check.rows) for check in checks}
    assert rows["model: equality"]["identical"] == "3 of 3, 16 tokens each"
    assert float(rows["self: logits"]["largest error against float32, engine"]) < 1e-4
    assert {name.split(",")[0] for name in rows["self: speed"]} == {"plain", "speculative", "KV pools"}
    assert set(rows["self: speed"]) >= {"plain, batch 1, context 120", "speculative, batch 4, context 120"}


def test_wrong_logits_are_noticed(tiny_plan: CheckPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TrtllmRunner.forward
    monkeypatch.setattr(TrtllmRunner, "forward", lambda self, inputs: forward(self, inputs) + 0.01)
    check = gpu_checks.check_logits(tiny_plan, built(tiny_plan))
    assert not check.passed


@pytest.mark.parametrize("check", [gpu_checks.check_equality, gpu_checks.check_law])
def test_wrong_acceptance_is_noticed(
    check: Callable[[CheckPlan, Path], Check], tiny_plan: CheckPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "accepts", lambda target_prob, *_: np.ones(len(target_prob), dtype=bool))
    monkeypatch.setattr(sampler, "greedy_sample", lambda best, ids: rejection.VerifyOutput(len(ids), (*ids, best[-1])))
    assert not check(replace(tiny_plan, num_samples=150), built(tiny_plan)).passed


def built(plan: CheckPlan) -> Path:
    """The pair with a draft model, built if no test has done so yet."""
    directory = plan.directory / "model"
    draft, config = plan.pairs["model"]
    assert isinstance(draft, Path)
    return directory if directory.exists() else build_pair(plan.target, draft, config, directory, workers=0)


def test_the_former_name_is_the_same_command() -> None:
    """It stays for scripts that call it, and is not offered."""
    runner = CliRunner()
    new, old = (runner.invoke(app, [name, "--help"]).output.split() for name in ("trtllm-check", "gpu-check"))
    assert "cyclic" in new
    shared = new[: new.index("Examples")]
    assert old[: len(shared)] == ["gpu-check" if word == "trtllm-check" else word for word in shared]
    assert "gpu-check" not in runner.invoke(app, ["--help"]).output
