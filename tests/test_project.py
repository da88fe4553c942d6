"""What the project says about itself agrees: one version, and one list of floors."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from importlinter import api
from setuptools.config.pyprojecttoml import read_configuration

import magicdec
from tests.support.paths import ROOT

PROJECT = ROOT / "pyproject.toml"


def floors() -> list[str]:
    """Names of the contract that imports point one way."""
    contracts = api.read_configuration(config_filename=str(PROJECT))["contracts_options"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [name.strip() for layer in layers for name in layer.split("|")]


def test_the_version_stands_in_one_place(tmp_path: Path) -> None:
    """Metadata follow the source; the copy here has another version, so that no other place can give it."""
    assert "version" not in read_configuration(PROJECT, expand=False)["project"]
    (tmp_path / "magicdec").mkdir()
    for name in ("pyproject.toml", "README.md", "magicdec/__init__.py"):
        text = (ROOT / name).read_text(encoding="utf-8").replace(f'"{magicdec.__version__}"', '"7.8.9"')
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_configuration(tmp_path / "pyproject.toml")["project"]["version"] == "7.8.9"


def test_installed_and_announced_versions_are_this_one() -> None:
    assert version("magicdec") == magicdec.__version__, "install anew: make install-test"
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == magicdec.__version__


@pytest.mark.parametrize("name", floors())
def test_each_floor_is_explained_and_drawn(name: str) -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in cell for cell in cells), f"docs/architecture.md has no row for {name}"
    picture = (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
    assert f">{name}</text>" in picture, "draw it anew: python -m benchmarks.pages.architecture_picture"


def test_architecture_names_no_floor_that_is_gone() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("| floor |")[1].split("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[1])]
    assert named == floors()
