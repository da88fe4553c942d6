"""The demo: its parts on a tiny pair, and the whole of it with the real model."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from magicdec.bench import comparison, demo_pair
from magicdec.errors import RequestError
from magicdec.pair.manifest import load_pair
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.tasks import demo
from tests.e2e.conftest import PairFactory
from tests.support.engines import tiny_pair
from tests.support.paths import ROOT

TEXT = "there in the one and on the other are the rest then "
PARAMS = SamplingParams(temperature=0, frequency_penalty=0.3, max_tokens=30, ignore_eos=True)


@pytest.fixture
def llm(pair: PairFactory) -> LLM:
    return demo.load(pair("self"), demo.Limits(400, 40, None, 3))


def test_the_prompt_has_the_length_asked_for(llm: LLM) -> None:
    prompt = demo.fit_prompt(llm, TEXT * 50, "what?", 300)
    assert len(prompt) == 300
    whole = llm.chat_prompt([{"role": "user", "content": f"{TEXT * 50}\n\nwhat?"}])
    assert prompt[:250] == whole[:250]
    assert llm.tokenizer.decode(prompt).endswith("\n\nwhat?")
    assert prompt[-1] == whole[-1]  # the template's own tokens stand behind the question
    short = demo.fit_prompt(llm, TEXT, "what?", 300)
    assert llm.tokenizer.decode(short) == f"{TEXT}\n\nwhat?"
    with pytest.raises(RequestError, match="--context 12"):
        demo.fit_prompt(llm, TEXT, "what is this text about?", 12)


def test_the_default_text_is_long_and_always_the_same() -> None:
    text = demo_pair.read_long_text(None)
    assert len(text) > 300_000
    assert text.startswith('The "assert" statement')


def test_an_engine_is_used_again_only_when_whole_and_of_this_configuration(tmp_path: Path) -> None:
    directory = tiny_pair(tmp_path, "self")  # its own, since it is damaged below
    config = load_pair(directory).config
    assert demo_pair.is_built(directory, config)
    assert not demo_pair.is_built(directory, config.model_copy(update={"max_seq_len": 99}))
    assert not demo_pair.is_built(directory / "nothing", config)
    settings = directory / "target" / "config.json"
    settings.write_text(settings.read_text() + " ")
    assert not demo_pair.is_built(directory, config)


def test_the_table_says_what_the_runs_did(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = demo.fit_prompt(llm, TEXT * 50, "what?", 400)
    first, kv_bytes = demo.answer(llm, prompt, PARAMS)
    assert capsys.readouterr().out == first.outputs[0].text + "\n\n"
    runs = comparison.compare(llm, prompt, PARAMS)
    rows = dict(comparison.result_rows(llm, PARAMS, first, runs, kv_bytes))
    assert [run.metrics.num_rounds for run in runs.plain] == [0, 0]
    assert all(run.metrics.num_rounds > 0 for run in runs.speculative)
    assert all(run.metrics.num_cached_tokens >= 384 for run in (*runs.plain, *runs.speculative))
    assert rows["outputs identical"] == "yes, all 30 tokens in all 5 runs"
    assert rows["prompt tokens"] == "400"
    assert rows["draft KV bytes"].startswith("0 ")
    assert rows["draft"].startswith("self; sees at most ")
    # 400 + 30 tokens in blocks of 16; 2 layers x keys and values x 2 heads x 8 numbers x 4 bytes a token
    assert int(rows["target KV bytes"].split(" ")[0].replace(",", "")) == 27 * 16 * 256
    accepted = runs.speculative[0].metrics.num_accepted_tokens
    assert f"({accepted} of {runs.speculative[0].metrics.num_draft_tokens} draft tokens" in rows["acceptance length"]


def test_a_difference_is_said_plainly(llm: LLM) -> None:
    prompt = demo.fit_prompt(llm, TEXT * 50, "what?", 400)
    runs = comparison.compare(llm, prompt, PARAMS)
    first = runs.plain[0]

    def with_token(run: RequestOutput, index: int, token: int) -> RequestOutput:
        tokens = list(run.outputs[0].token_ids)
        tokens[index] = token
        return replace(run, outputs=[replace(run.outputs[0], token_ids=tokens)])

    wrong = with_token(runs.speculative[0], 7, 5 if first.outputs[0].token_ids[7] != 5 else 6)
    told = comparison._identical(llm, PARAMS, first, replace(runs, speculative=(wrong, runs.speculative[1])))
    margin = re.match(r"NO: they part at token 8, where the two best are (\S+) apart .*report it as a bug", told)
    assert margin is not None
    assert float(margin[1]) > 1e-3


def test_the_speeds_are_tokens_over_seconds(llm: LLM) -> None:
    prompt = demo.fit_prompt(llm, TEXT * 50, "what?", 400)
    (run,) = llm.generate([prompt], PARAMS)
    runs = [replace(run, metrics=replace(run.metrics, decode_seconds=seconds)) for seconds in (2.0, 4.0)]
    compared = comparison.Comparison(plain=(runs[0], runs[0]), speculative=(runs[1], runs[0]))
    assert comparison.total_rate(compared.plain) == pytest.approx(29 / 2)
    assert comparison.total_rate(compared.speculative) == pytest.approx(58 / 6)
    assert compared.speedup == pytest.approx(2 / 3)


def run_demo(*args: str) -> tuple[str, dict[str, str]]:
    """Standard output of `magicdec demo`, and the closing table. Downloads and the engine stay in .cache/."""
    command = [sys.executable, "-m", "magicdec", "demo", "--cache-dir", str(ROOT / ".cache"), *args]
    wide = os.environ | {"COLUMNS": "250"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=ROOT, env=wide)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.startswith("│")]
    return done.stdout, {name.strip(): value.strip() for name, value in rows}


def test_the_demo_with_a_short_text(tmp_path: Path) -> None:
    """The real model in every step of the demo, on a text of the user's own."""
    (tmp_path / "text.txt").write_text("The lighthouse keeper was called Ada. " * 200)
    args = ["--text-file", str(tmp_path / "text.txt"), "--question", "What was the lighthouse keeper called?"]
    text, table = run_demo(*args, "--context", "300", "--max-tokens", "12")
    assert "Ada" in text[: text.index("What this run measured")]
    assert table["prompt tokens"] == "300"
    assert table["outputs identical"].startswith("yes")
    assert table["dtype"] == "bfloat16"
    assert "int4" in table["draft"]


@pytest.mark.slow
def test_the_demo_as_make_demo_runs_it() -> None:
    text, table = run_demo()
    assert len(text[: text.index("What this run measured")]) > 200
    assert table["prompt tokens"] == "4,096"
    assert 20 < int(table["output tokens"]) <= 128  # the model may come to an end of its own
    assert table["outputs identical"] == f"yes, all {table['output tokens']} tokens in all 5 runs"
    assert float(table["acceptance length"].split()[0]) > 1
    assert table["draft KV bytes"].startswith("0 ")
    assert float(table["tokens/s plain"].split()[0]) > 0
    assert float(table["tokens/s speculative"].split()[0]) > 0
