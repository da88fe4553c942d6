"""Start-up: what is imported, public names, help, threads."""

import os
import re
import subprocess
import sys

import pytest

import magicdec
from magicdec import SamplingParams
from magicdec.builder.config import CONFIG_DIR
from magicdec.cli import main
from magicdec.pair.config import DraftConfig, PairConfig
from tests.commands.commands import succeed
from tests.support.paths import ROOT


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
    text = (ROOT / "docs/usage.md").read_text()
    words = set(re.findall(r"[a-z_.]+", text))
    assert set(SamplingParams.model_fields) <= words
    assert set(PairConfig.model_fields) <= {word.split(".")[0] for word in words}
    assert {f"draft.{name}" for name in DraftConfig.model_fields} <= words
    assert {path.stem for path in CONFIG_DIR.glob("*.yaml")} <= set(re.findall(r"`([a-z0-9.-]+)`", text))
