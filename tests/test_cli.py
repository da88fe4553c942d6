"""The command line on a tiny pair: the same results as the Python interface, and one clear message for each mistake."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

import magicdec
from magicdec import LLM, RequestOutput, SamplingParams, console
from magicdec.builder.config import CONFIG_DIR
from magicdec.cli import app, build_engine, main
from magicdec.runtime.manifest import DraftConfig, PairConfig, load_engine, load_pair
from magicdec.runtime.model_input import ModelInput, SequenceInput, pack
from tests.engines import tiny_pair
from tests.tiny_models import write_tiny_checkpoint

PROMPT = "in the other one the rest are there and then on and on again "
CONFIG = {
    "name": "tiny",
    "target": "random",
    "draft": {"kind": "self", "window_size": 32},
    "dtype": "float32",
    "max_seq_len": 256,
    "max_num_tokens": 128,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("cli"), "self")


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "hf")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def run(*args: object, stdin: str | None = None) -> Result:
    wide = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env=wide)


def succeed(*args: object, stdin: str | None = None) -> Result:
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def fail(*args: object) -> str:
    """The message of a user's error: one, on stderr, without a traceback."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return str(result.stderr)


# Start-up


@pytest.mark.parametrize("code", ["import magicdec", "import magicdec.cli", "magicdec.cli.app(['generate', '--help'])"])
def test_no_heavy_import_before_it_is_needed(code: str) -> None:
    check = "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'imported too early'"
    script = (
        f"import sys, atexit, magicdec.cli\natexit.register(lambda: print('done'))\ntry:\n {code}\nfinally:\n {check}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_public_names() -> None:
    for name in magicdec.__all__:
        assert getattr(magicdec, name) is not None
        assert name in dir(magicdec)
    with pytest.raises(AttributeError, match="Llm"):
        magicdec.Llm  # noqa: B018


def test_version_and_module_entry() -> None:
    assert succeed("--version").stdout == f"magicdec {magicdec.__version__}\n"
    command = [sys.executable, "-m", "magicdec", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.startswith(
        "magicdec "
    )


@pytest.mark.parametrize("own", [None, "7"])
def test_threads_do_not_spin_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "restored by monkeypatch")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if own:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    monkeypatch.setattr(sys, "argv", ["magicdec", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert os.environ["GOMP_SPINCOUNT"] == own or (own is None and int(os.environ["GOMP_SPINCOUNT"]) < 100_000)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("build", ["--target", "--draft", "DIR|self|ngram", "--config", "--output", "--tp", "--dtype", "--overwrite"]),
        ("generate", ["--engine", "--prompt-file", "--chat", "--num-draft-tokens", "--stream", "coupled"]),
        ("inspect", ["DIR", "--context", "--batch", "--verify"]),
        ("demo", ["--context", "--max-tokens", "--text-file", "--dtype", "--window", "[default: 4096]"]),
    ],
)
def test_help_names_the_options_and_gives_examples(command: str, words: list[str]) -> None:
    text = succeed(command, "--help").stdout
    for word in [*words, "Examples"]:
        assert word in text
    assert command in succeed("--help").stdout


def test_the_usage_page_names_every_key_parameter_and_option() -> None:
    text = (Path(__file__).parent.parent / "docs" / "usage.md").read_text()
    words = set(re.findall(r"[a-z_.]+", text))
    assert set(SamplingParams.model_fields) <= words
    assert set(PairConfig.model_fields) <= {word.split(".")[0] for word in words}
    assert {f"draft.{name}" for name in DraftConfig.model_fields} <= words
    assert {path.stem for path in CONFIG_DIR.glob("*.yaml")} <= set(re.findall(r"`([a-z0-9.-]+)`", text))


# build


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


# generate


def api(llm: LLM, **options: object) -> RequestOutput:
    return llm.generate(PROMPT, SamplingParams(**options))[0]  # type: ignore[arg-type]


def test_generate_prints_what_the_api_gives(engine: Path, llm: LLM) -> None:
    wanted = api(llm, temperature=0, max_tokens=40, ignore_eos=True)
    options = ["--temperature", 0, "--max-tokens", 40, "--ignore-eos"]
    result = succeed("generate", "--engine", engine, "--prompt", PROMPT, *options)
    assert result.stdout == wanted.outputs[0].text + "\n"
    assert "40 output tokens" in result.stderr
    assert f"acceptance length {wanted.metrics.acceptance_length:.2f} " in result.stderr
    streamed = succeed("generate", "--engine", engine, "--prompt", PROMPT, *options, "--stream")
    assert streamed.stdout == result.stdout
    plain = succeed("generate", "--engine", engine, "--prompt", PROMPT, *options, "--num-draft-tokens", 0)
    assert plain.stdout == result.stdout
    assert "acceptance" not in plain.stderr


def test_every_sampling_option_reaches_the_request(engine: Path, llm: LLM) -> None:
    """Each option is seen in an output that it changes."""
    base: dict[str, object] = {"seed": 5, "max_tokens": 30}
    unchanged = api(llm, **base).outputs
    text, token = unchanged[0].text, unchanged[0].token_ids[4]
    options: dict[str, tuple[list[object], dict[str, object]]] = {
        "temperature": (["--temperature", 0.5], {"temperature": 0.5}),
        "top_k": (["--top-k", 2], {"top_k": 2}),
        "top_p": (["--top-p", 0.3], {"top_p": 0.3}),
        "min_p": (["--min-p", 0.5], {"min_p": 0.5}),
        "repetition_penalty": (["--repetition-penalty", 3], {"repetition_penalty": 3.0}),
        "presence_penalty": (["--presence-penalty", 2], {"presence_penalty": 2.0}),
        "frequency_penalty": (["--frequency-penalty", 2], {"frequency_penalty": 2.0}),
        "logit_bias": (["--logit-bias", "9=50", "--logit-bias", "8=50"], {"logit_bias": {9: 50.0, 8: 50.0}}),
        "bad_words": (["--bad-word", text[0], "--bad-word", text[-1]], {"bad_words": [text[0], text[-1]]}),
        "stop": (["--stop", text[9:11], "--stop", text[5:7]], {"stop": [text[9:11], text[5:7]]}),
        "stop_token_ids": (["--stop-token-id", 10, "--stop-token-id", token], {"stop_token_ids": [10, token]}),
        "ignore_eos": (["--ignore-eos", "--logit-bias", "2=8"], {"ignore_eos": True, "logit_bias": {2: 8.0}}),
        "min_tokens": (["--min-tokens", 20, "--logit-bias", "2=8"], {"min_tokens": 20, "logit_bias": {2: 8.0}}),
        "n": (["--n", 3], {"n": 3}),
        "logprobs": (["--logprobs", 2], {"logprobs": 2}),
        "acceptance": (["--acceptance", "rejection"], {"acceptance": "rejection"}),
    }
    command = ["generate", "--engine", engine, "--prompt", PROMPT, "--seed", 5, "--max-tokens", 30, "--json"]
    for name, (args, params) in options.items():
        wanted = api(llm, **base | params).outputs
        assert wanted != unchanged, f"{name} changes nothing here, so that its loss would not be seen"
        printed = json.loads(succeed(*command, *args).stdout)["outputs"]
        assert [item["token_ids"] for item in printed] == [item.token_ids for item in wanted], name
        assert [item["text"] for item in printed] == [item.text for item in wanted], name
        assert [item["stop_reason"] for item in printed] == [item.stop_reason for item in wanted], name
        assert [item["logprobs"] is None for item in printed] == [item.logprobs is None for item in wanted], name


def test_json_has_metrics_and_logprobs(engine: Path, llm: LLM) -> None:
    wanted = api(llm, temperature=0, max_tokens=6, logprobs=1)
    args = ["--temperature", 0, "--max-tokens", 6, "--logprobs", 1, "--json"]
    data = json.loads(succeed("generate", "--engine", engine, "--prompt", PROMPT, *args).stdout)
    assert data["metrics"]["acceptance_length"] == wanted.metrics.acceptance_length
    assert data["metrics"]["num_prompt_tokens"] == wanted.metrics.num_prompt_tokens
    rows = wanted.outputs[0].logprobs
    assert rows is not None
    for printed, row in zip(data["outputs"][0]["logprobs"], rows, strict=True):
        assert {token: entry["rank"] for token, entry in printed.items()} == {str(t): e.rank for t, e in row.items()}
        assert [entry["logprob"] for entry in printed.values()] == pytest.approx([e.logprob for e in row.values()])


def test_prompt_from_file_stdin_and_chat(engine: Path, llm: LLM, tmp_path: Path) -> None:
    args = ["generate", "--engine", engine, "--temperature", 0, "--max-tokens", 12]
    wanted = succeed(*args, "--prompt", PROMPT).stdout
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert succeed(*args, "--prompt-file", file).stdout == wanted
    assert succeed(*args, "--prompt-file", "-", stdin=PROMPT).stdout == wanted
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": PROMPT}]
    params = SamplingParams(temperature=0, max_tokens=12)
    answer = llm.generate([llm.chat_prompt(messages)], params)[0].outputs[0].text
    assert succeed(*args, "--prompt", PROMPT, "--chat", "--system", "short").stdout == answer + "\n"
    assert answer + "\n" != wanted


def test_generate_refuses_with_value_and_mend(engine: Path, tmp_path: Path) -> None:
    def generate(*args: object) -> str:
        return fail("generate", "--engine", engine, *args)

    assert "--prompt-file" in generate()
    assert "both" in generate("--prompt", "a", "--prompt-file", "b")
    assert "nowhere.txt" in generate("--prompt-file", tmp_path / "nowhere.txt")
    (tmp_path / "latin").write_bytes(b"\xe9\xff")
    assert "UTF-8" in generate("--prompt-file", tmp_path / "latin")
    message = generate("--prompt", "a", "--top-p", 3)
    assert "top_p is 3.0" in message
    assert "at most 1" in message
    assert "temperature" in generate("--prompt", "a", "--temperature", "nan")
    message = generate("--prompt", "z " * 700)
    assert re.search(r"\d{4} tokens", message)
    assert "max_seq_len=1024" in message
    assert "the prompt is empty" in generate("--prompt", "")
    assert "'5' is not ID=VALUE" in generate("--prompt", "a", "--logit-bias", "5")
    assert "--chat" in generate("--prompt", "a", "--system", "s")
    assert "--json" in generate("--prompt", "a", "--logprobs", 2)
    assert "--stream" in generate("--prompt", "a", "--stream", "--n", 2)
    assert "99" in generate("--prompt", "a", "--num-draft-tokens", 99)
    assert "give 0, 1, 2, ... or auto" in generate("--prompt", "a", "--num-draft-tokens", "many")
    assert "drafter 'own'" in generate("--prompt", "a", "--drafter", "auto")
    assert "window_size" in generate("--prompt", "a", "--window-size", 33)
    assert "pair.json is missing" in fail("generate", "--engine", tmp_path, "--prompt", "a")


def test_a_failed_request_is_an_error(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from magicdec.runtime.torch_runner import TorchRunner

    forward = TorchRunner.forward
    monkeypatch.setattr(TorchRunner, "forward", lambda self, inputs: forward(self, inputs) * torch.nan)
    assert "generation failed" in fail("generate", "--engine", engine, "--prompt", "a", "--max-tokens", 3)


def test_interrupt_ends_quietly(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr("magicdec.runtime.engine.Engine.step", interrupted)
    result = run("generate", "--engine", engine, "--prompt", "a")
    assert result.exit_code == 130
    assert result.stderr == "\nInterrupted.\n"


def test_bars_are_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        screen = io.StringIO()
        drawn = Console(file=screen, force_terminal=is_terminal, width=100)
        monkeypatch.setattr(console, "err", lambda drawn=drawn: drawn)
        with console.PrefillBar(1000) as bar:
            bar([], 250, 1000)
            bar([object()], 0, 0)
        assert ("Reading the prompt (1,000 tokens)" in screen.getvalue()) is is_terminal
        assert ("100%" in screen.getvalue()) is is_terminal


# inspect


@pytest.mark.parametrize("drafter", ["self", "in_cache", "ngram"])
def test_inspect_equals_the_allocator(tmp_path_factory: pytest.TempPathFactory, drafter: str) -> None:
    directory = tiny_pair(tmp_path_factory.mktemp("inspect"), drafter)  # type: ignore[arg-type]
    data = json.loads(succeed("inspect", directory, "--context", 600, "--batch", 4, "--json").stdout)
    allocated = LLM(directory, kv_cache_tokens=4 * 608, max_batch_size=4).memory()  # 608: whole blocks of 16
    assert data["memory"]["target_kv"] == allocated["target_kv_bytes"]
    assert data["memory"]["draft_kv"] == allocated["draft_kv_bytes"]
    assert (allocated["draft_kv_bytes"] > 0) is (drafter == "in_cache")
    table = succeed("inspect", directory, "--context", 600, "--batch", 4).stdout
    for role, engine in data["engines"].items():
        assert role.capitalize() in table
        assert f"{engine['num_parameters']:,} parameters" in table
    for name in ("target_weights", "draft_weights", "target_kv", "draft_kv", "total"):
        assert console.format_bytes(data["memory"][name]) in table


@pytest.mark.parametrize("drafter", ["self", "in_cache"])
def test_inspect_says_how_much_a_draft_sees(
    tmp_path_factory: pytest.TempPathFactory, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stated bound is reached, and never passed, by what draft passes really look at."""
    directory = tiny_pair(tmp_path_factory.mktemp("view"), drafter)  # type: ignore[arg-type]
    said = re.search(r"at most (\d+) tokens", succeed("inspect", directory).stdout)
    assert said is not None
    seen: list[int] = []

    def spy(rows: list[SequenceInput]) -> ModelInput:
        seen.extend(row.cache_len + len(row.token_ids) for row in rows)
        return pack(rows)

    monkeypatch.setattr("magicdec.runtime.model_proposer.pack", spy)
    LLM(directory).generate([[7] * 200], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert max(seen) == int(said[1])


def test_inspect_refuses_with_value_and_mend(tmp_path: Path) -> None:
    directory = tiny_pair(tmp_path, "self")
    message = fail("inspect", directory, "--context", 5000)
    assert "5000" in message
    assert "1024" in message
    assert "All files match" in succeed("inspect", directory, "--verify").stderr
    weights = directory / "target" / "rank0.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert "rank0.safetensors" in fail("inspect", directory, "--verify")
    weights.write_bytes(damaged[:-8])
    assert "truncated" in fail("inspect", directory)
    assert "pair.json is missing" in fail("inspect", tmp_path / "nothing")
