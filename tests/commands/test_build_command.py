"""`magicdec build`: engines that load, and one clear message for each mistake."""

import logging
import sys
from pathlib import Path

import pytest
import yaml

from magicdec import LLM, SamplingParams, console
from magicdec.cli import build_engine
from magicdec.pair.manifest import load_engine, load_pair
from tests.commands.commands import CONFIG, PROMPT, fail, succeed
from tests.support.tiny_models import write_tiny_checkpoint


def test_build_makes_an_engine_that_loads(tmp_path: Path, checkpoint: Path, config: Path) -> None:
    output = tmp_path / "engine"
    result = succeed("build", "--target", checkpoint, "--draft", "self", "--config", config, "--output", output)
    assert f"Built {output}" in result.stderr
    built = load_pair(output).config
    assert (built.dtype, built.draft.kind, built.tp_size) == ("float32", "self", 1)
    assert LLM(output).generate("the", SamplingParams(max_tokens=2))[0].finished


def test_build_quantises_target_and_draft_as_told(tmp_path: Path, checkpoint: Path, config: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 20)
    both = ("--target", checkpoint, "--draft", checkpoint, "--config", config, "--output", tmp_path / "engine")
    formats = ("--quantize-target", "fp8", "--kv-cache-dtype", "fp8", "--draft-kv-cache-dtype", "auto")
    succeed("build", *both, *formats, "--calibration-file", text)
    target, draft = (load_engine(tmp_path / "engine" / role) for role in ("target", "draft"))
    assert (target.quant_algo, target.kv_cache_quant_algo, target.calibration) == ("FP8", "FP8", str(text))
    assert (draft.quant_algo, draft.kv_cache_quant_algo, draft.calibration) == (None, None, None)
    succeed("build", *both, "--quantize-draft", "fp8", "--calibration-file", text, "--overwrite")
    assert (load_engine(tmp_path / "engine/target").quant_algo, load_engine(tmp_path / "engine/draft").quant_algo) == (
        None,
        "FP8",
    )
    alone = ("--target", checkpoint, "--draft", "self", "--config", config, "--output", tmp_path / "new")
    assert "leave quantization.draft out" in fail("build", *alone, "--quantize-draft", "fp8")
    assert "verified in one pass" in fail("build", *alone, "--kv-cache-dtype", "fp8", "--backend", "trtllm")
    assert "use int8" in fail("build", *alone, "--quantize-draft", "int4"), "the tiny model's rows are too short"
    assert "use 'fp8'" in fail("build", *alone, "--quantize-draft", "int8", "--backend", "trtllm")
    succeed("build", *alone, "--quantize-draft", "int8", "--calibration-file", text)
    target, draft = (load_engine(tmp_path / "new" / role) for role in ("target", "draft"))
    assert (target.quant_algo, draft.quant_algo, draft.calibration) == (None, "W8A16", str(text))


def test_build_engine_is_the_same_command(
    tmp_path: Path,
    checkpoint: Path,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "engine"
    args = ["--target", checkpoint, "--draft", checkpoint, "--config", config, "--output", output, "--tp", 2]
    monkeypatch.setattr(sys, "argv", ["build-engine", *map(str, args), "--dtype", "bfloat16", "--draft-tp", "1"])
    with pytest.raises(SystemExit) as end:
        build_engine()
    assert end.value.code == 0
    built = load_pair(output).config
    assert (built.dtype, built.draft.kind, built.tp_size) == ("bfloat16", "model", 2)
    assert load_engine(output / "draft").role == "draft"
    assert (load_engine(output / "target").tp_size, load_engine(output / "draft").tp_size) == (2, 1)
    assert "for 2 ranks, its draft for 1. Next" in capsys.readouterr().err
    assert "2, draft 1" in succeed("inspect", output).stdout


def test_build_refuses_with_value_and_mend(tmp_path: Path, checkpoint: Path, config: Path, engine: Path) -> None:
    def build(**changes: object) -> str:
        options = {"target": checkpoint, "draft": "self", "config": config, "output": tmp_path / "new"} | changes
        message = fail("build", *(part for name, value in options.items() for part in (f"--{name}", value)))
        assert not (tmp_path / "new").exists()
        return message

    assert "missing_dir" in build(target=tmp_path / "missing_dir")
    assert "smollm2-135m-self" in build(config="no-such-config")  # lists what there is
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(yaml.safe_dump(CONFIG | {"max_sequence_len": 99}))
    message = build(config=misspelt)
    assert "max_sequence_len" in message
    assert "99" in message
    assert "did you mean max_seq_len?" in message
    assert "--overwrite" in build(output=engine)
    other = write_tiny_checkpoint(tmp_path / "other", vocab_size=140)
    message = build(draft=other)
    assert "128" in message
    assert "140" in message


def test_warnings_of_the_package_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with console.shown_warnings():
        logging.getLogger("magicdec.builder").warning("mind the %s", "[gap]")
        logging.getLogger("magicdec.builder").info("quiet")
    logging.getLogger("magicdec.builder").info("quiet")
    assert capsys.readouterr().err == "Warning: mind the [gap]\n"
