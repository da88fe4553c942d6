"""`magicdec generate` on a tiny pair: the same results as the Python interface, a clear message for each mistake."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from magicdec import LLM, RequestOutput, SamplingParams, console
from tests.commands.commands import PROMPT, fail, run, succeed


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
    from magicdec.runtime.runners.torch_runner import TorchRunner

    forward = TorchRunner.forward
    monkeypatch.setattr(TorchRunner, "forward", lambda self, inputs: forward(self, inputs) * torch.nan)
    assert "generation failed" in fail("generate", "--engine", engine, "--prompt", "a", "--max-tokens", 3)


def test_interrupt_ends_quietly(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr("magicdec.runtime.engine.engine.Engine.step", interrupted)
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
