"""Building pairs for TensorRT-LLM: what stands there afterwards, processes, failures, and the dry run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from magicdec.builder.build import build_pair, plan_pair
from magicdec.builder.trtllm import rules as trtllm_rules
from magicdec.builder.trtllm.compile import compile_engines
from magicdec.builder.trtllm.plan import plan_engines
from magicdec.cli import app
from magicdec.errors import BuildError, ConfigError
from magicdec.pair.manifest import check_hashes, load_engine, load_pair
from tests.builder.engines import tiny_config
from tests.support.tiny_models import write_tiny_checkpoint
from tests.support.trtllm import read_checkpoint
from tests.support.trtllm_driver import Driver

SETTINGS: dict[str, Any] = {"backend": "trtllm", "gpu": "h100-80gb", "dtype": "bfloat16", "max_num_tokens": 512}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "hf")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_directory_of_a_compiled_pair(tmp_path: Path, checkpoint: Path, standin: Any) -> None:
    """Two ranks, each compiled in a process of its own; the draft's engine is small."""
    draft = write_tiny_checkpoint(tmp_path / "draft-hf", "qwen3")
    seen: list[tuple[str, int, int]] = []
    output = build_pair(
        checkpoint,
        draft,
        tiny_config(**SETTINGS),
        tmp_path / "engine",
        tp_size=2,
        workers=2,
        on_progress=lambda *args: seen.append(args),
    )
    files = ["build_config.json", "config.json", "engine.json", "generation_config.json"]
    files += [f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("engine", "safetensors")]
    files += ["tokenizer.json", "tokenizer_config.json"]
    assert names(output / "target") == names(output / "draft") == files
    assert names(tmp_path) == ["draft-hf", "engine", "engine.timing_cache", "hf"]
    assert [entry for entry in seen if entry[0].startswith("compile")] == [
        (f"compile {role}", done, 2) for role in ("target", "draft") for done in range(3)
    ]
    config = load_pair(output).config
    assert (config.backend, config.tp_size) == ("trtllm", 2)
    for role, length in (("target", 1032), ("draft", config.draft_budget)):
        manifest = load_engine(output / role)
        assert (manifest.backend, set(manifest.files)) == ("trtllm", {*files} - {"engine.json"})
        check_hashes(output / role)
        build = json.loads((output / role / "build_config.json").read_text())["build_config"]
        assert build["max_seq_len"] == length
        Driver(standin, output / role, 4, rank=1)
    checkpoint_config = json.loads((output / "target" / "config.json").read_text())
    assert checkpoint_config["position_embedding_type"] == "rope_gpt_neox"


@pytest.mark.usefixtures("standin")
def test_the_timing_cache_is_read_again(tmp_path: Path, checkpoint: Path) -> None:
    for overwrite in (False, True):
        output = build_pair(
            checkpoint, "self", tiny_config(**SETTINGS), tmp_path / "engine", workers=0, overwrite=overwrite
        )
        build = json.loads((output / "target" / "build_config.json").read_text())["build_config"]
        cache = str(tmp_path / "engine.timing_cache")
        assert build["output_timing_cache"] == cache
        assert build["input_timing_cache"] == (cache if overwrite else None)


def test_without_tensorrt_llm_nothing_is_begun(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(BuildError, match=r"tensorrt-llm==1\.2\.1") as caught:
        build_pair(checkpoint, "self", tiny_config(**SETTINGS), tmp_path / "engine")
    assert "--backend torch" in str(caught.value)
    assert names(tmp_path) == ["hf"]


@pytest.mark.usefixtures("standin")
def test_a_broken_rule_stops_before_the_weights(tmp_path: Path, checkpoint: Path) -> None:
    stages = set()
    settings = tiny_config(**SETTINGS | {"max_batch_size": 100})
    with pytest.raises(ConfigError, match="max_num_tokens 512 is less than"):
        build_pair(checkpoint, "self", settings, tmp_path / "engine", on_progress=lambda stage, *_: stages.add(stage))
    assert stages == {"tokenizer"}
    assert names(tmp_path) == ["hf"]


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_fails_is_named(tmp_path: Path, checkpoint: Path, workers: int) -> None:
    """In this process and in another: the error comes through, and no engine is left."""
    pair = build_pair(checkpoint, "self", tiny_config(dtype="bfloat16"), tmp_path / "pair", tp_size=2)
    plan = plan_engines(tiny_config(**SETTINGS), {"target": read_checkpoint(pair / "target")})["target"]
    shutil.copy(pair / "target" / "config.json", pair / "target" / "rank1.safetensors")
    with pytest.raises(BuildError, match="could not build rank 1 of the target"):
        compile_engines(pair / "target", plan, workers=workers)
    assert not list((pair / "target").glob(".engine-*"))
    assert not (pair / "target" / "rank1.engine").exists()


@pytest.mark.usefixtures("standin")
def test_a_process_that_dies_is_an_error_and_no_hang(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICDEC_STANDIN_SM", "die")
    with pytest.raises(BuildError, match="a process that compiled the target died"):
        build_pair(checkpoint, "self", tiny_config(**SETTINGS), tmp_path / "engine", workers=1)
    assert names(tmp_path) == ["hf"]


@pytest.mark.usefixtures("standin")
def test_a_weight_of_the_wrong_shape_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    pair = build_pair(checkpoint, "self", tiny_config(dtype="bfloat16"), tmp_path / "pair")
    values = read_checkpoint(pair / "target") | {"intermediate_size": 40}
    plan = plan_engines(tiny_config(**SETTINGS), {"target": values})["target"]
    with pytest.raises(BuildError, match=r"mlp\.fc\.weight"):
        compile_engines(pair / "target", plan, workers=0)


def test_plan_pair_is_what_build_pair_builds(tmp_path: Path, checkpoint: Path, standin: Any) -> None:
    assert standin
    settings = tiny_config(**SETTINGS)
    output = build_pair(checkpoint, "self", settings, tmp_path / "engine", workers=0)
    built = plan_engines(settings, {"target": read_checkpoint(output / "target")})
    assert plan_pair(checkpoint, "self", settings) == built


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture
def build_args(tmp_path: Path, checkpoint: Path) -> list[object]:
    path = tmp_path / "tiny.yaml"
    draft = {"kind": "self", "window_size": 64}
    path.write_text(yaml.safe_dump({"name": "t", "target": "t", "draft": draft, "max_seq_len": 1024}))
    output = tmp_path / "engine"
    return ["build", "--target", checkpoint, "--draft", "self", "--config", path, "--output", output]


def test_dry_run_needs_no_tensorrt_llm(build_args: list[object], tmp_path: Path) -> None:
    result = run(*build_args, "--backend", "trtllm", "--tp", 2, "--dry-run")
    assert result.exit_code == 0, result.output
    for line in (
        "target: LlamaForCausalLM, 2 rank(s)",
        "    max_seq_len = 1024 -> 1032",
        "    speculative_decoding_mode = DRAFT_TOKENS_EXTERNAL",
        "    use_paged_context_fmha = True",
        "    nccl_plugin = bfloat16",
    ):
        assert line in result.stdout.splitlines()
    assert not (tmp_path / "engine").exists()


def test_dry_run_shows_broken_rules(build_args: list[object]) -> None:
    result = run(*build_args, "--backend", "trtllm", "--dtype", "float32", "--dry-run")
    assert result.exit_code == 2
    assert "kernels for 16-bit types only" in result.stderr


def test_dry_run_is_for_tensorrt_llm(build_args: list[object]) -> None:
    result = run(*build_args, "--dry-run")
    assert result.exit_code == 2
    assert "add --backend trtllm" in result.stderr


@pytest.mark.usefixtures("standin")
def test_command_compiles(build_args: list[object], tmp_path: Path) -> None:
    result = run(*build_args, "--backend", "trtllm", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "engine" / "target" / "rank0.engine").is_file()


def test_the_rules_are_the_real_ones_outside_the_fixture() -> None:
    """The fixture allows float32, which only the stand-in has kernels for; nothing else does."""
    assert {"float16", "bfloat16"} == trtllm_rules.FMHA_DTYPES
