"""The frame of every script that fills a page of docs/: its options, the commands that it runs, the marks it fills."""

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def options_of(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(command: list[str]) -> None:
    """Run in the repository, so that downloads and engines are kept in its .cache."""
    subprocess.run(command, check=True, cwd=ROOT)


def fill(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between the marks, which a page has once each."""
    begin, end = marks
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")
