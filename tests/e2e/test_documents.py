"""What the documents tell a reader to type works: Python blocks are run, options of commands exist.

A block that cannot run has a comment on the line before it, `<!-- not run: why -->`; all others are run, on a tiny pair
in place of whatever `engines/...` they load.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from magicdec.cli import app
from tests.e2e.conftest import PairFactory
from tests.support.paths import ROOT

Command = Any  # Click's, wherever Typer keeps it
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
# Marked as not run: how many in each document. A new mark has to be entered here, so that nobody sets one unseen.
NOT_RUN = {"docs/serving.md": 1, "docs/triton.md": 1}
PYTHON = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
TYPED = re.compile(r"^ {4}([^\n]+)|^```sh\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|\s)(magicdec|build-engine) +(.+)")
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
# Options that documents name by themselves and that are other programs'.
FOREIGN = {"--disable-auto-complete-config"}


@dataclass(frozen=True)
class Block:
    """A ```python block. why: what stands in the way of running it."""

    document: str
    line: int
    code: str
    why: str | None


def blocks() -> list[Block]:
    """Of all documents."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for match in PYTHON.finditer(text):
            line = text[: match.start("code")].count("\n") + 1
            found.append(Block(str(path.relative_to(ROOT)), line, match["code"], match["why"]))
    return found


BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.why is None]


def test_every_block_is_found_and_marks_are_known() -> None:
    fences = sum(path.read_text(encoding="utf-8").count("```python") for path in DOCUMENTS)
    assert len(BLOCKS) == fences
    assert {block.document for block in RUN} >= {"README.md", "docs/usage.md"}
    marked = [block.document for block in BLOCKS if block.why is not None]
    assert {document: marked.count(document) for document in marked} == NOT_RUN


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.document}:{block.line}")
def test_python_blocks_run(
    block: Block, pair: PairFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile("\n" * (block.line - 1) + block.code, block.document, "exec")
    if block.why is not None:
        return  # it is Python, more is not known
    monkeypatch.chdir(tmp_path)
    Path("engines").mkdir()
    for name in re.findall(r"engines/([\w-]+)", block.code):
        Path("engines", name).symlink_to(pair("in_cache"))
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() or "print(" not in block.code


def test_commands_and_their_options_exist() -> None:
    """As documents spell them; a line that goes on in the next one is read as one."""
    seen: set[str] = set()
    for path in DOCUMENTS:
        for typed in _typed(path.read_text(encoding="utf-8")):
            for program, rest in COMMAND.findall(typed):
                command, name = _command(program, rest.split())
                unknown = set(OPTION.findall(rest)) - _options(command)
                assert not unknown, f"{path.name}: {typed!r}, but {name} has no {sorted(unknown)}"
                seen.add(name)
    assert seen >= {"build", "generate", "inspect", "serve", "triton-repo", "bench"}


def test_options_that_stand_alone_exist() -> None:
    every = set().union(*map(_options, _commands(get_command(app)))) | FOREIGN
    named: set[str] = set()
    for path in DOCUMENTS:
        here = {
            option for span in re.findall(r"`(--[^`\n]+)`", path.read_text("utf-8")) for option in OPTION.findall(span)
        }
        assert here <= every, f"{path.name}: no command has {sorted(here - every)}"
        named |= here
    assert len(named) > 10


def _typed(text: str) -> list[str]:
    """Each command of code blocks and of code within a line, without its comment."""
    text = re.sub(r"\\?\n +(?=\[?--)", " ", text)
    lines = "\n".join("".join(groups) for groups in TYPED.findall(text)).splitlines()
    return [part for line in lines for part in re.split(r" \| | && |; | #", line)]


def _command(program: str, words: list[str]) -> tuple[Command, str]:
    """The command that these words call; build-engine is `magicdec build`."""
    command, name = get_command(app), program
    for word in ["build", *words] if program == "build-engine" else words:
        if not isinstance(command, TyperGroup):
            break
        inner = command.commands.get(word)
        if inner is None:
            assert word.startswith(("-", "[")) or name == "bench", f"there is no command {name} {word}"
            break
        command, name = inner, word
    return command, name


def _commands(command: Command) -> list[Command]:
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return [command, *(found for each in inner for found in _commands(each))]


def _options(command: Command) -> set[str]:
    return {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}
