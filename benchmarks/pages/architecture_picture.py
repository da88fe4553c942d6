"""Draws docs/architecture.svg: the floors of the import contract, and how many imports go from each to each.

    python -m benchmarks.pages.architecture_picture          from the repository, with the extra `test` installed

Floors are those of the layers contract in pyproject.toml, imports those that import-linter's own library finds: lazy
ones and those for types alone count as well. Modules of no floor (`magicdec` itself, `configs`) are left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import grimp
from importlinter import api

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.svg"
PACKAGE = "magicdec"

MARGIN, TOP = 24, 88  # pixels around the drawing, and above it for title and legend
BAR, ROW, GAP, COLUMN = 178, 24, 8, 28  # first bar's width, height of a bar, between layers, width of a step
STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #c5ccd3;
        --magicdec: #dbe9ff; --runtime: #d3f2df; --builder: #ffe6cc; --plugins: #efe0ff; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #b1bac4; --line: #3d444d;
          --magicdec: #1a3a66; --runtime: #14492c; --builder: #5c3610; --plugins: #45276e; }
  }
  .paper { fill: var(--paper); } text { fill: var(--ink); } .soft { fill: var(--soft); }
  .magicdec { fill: var(--magicdec); } .runtime { fill: var(--runtime); }
  .builder { fill: var(--builder); } .plugins { fill: var(--plugins); }
  .wire { stroke: var(--line); fill: none; } .tip { fill: var(--line); }
  .count { paint-order: stroke; stroke: var(--paper); stroke-width: 6px; stroke-linejoin: round; }
"""


@dataclass(frozen=True)
class Floor:
    """One name of the contract, and where its bar lies."""

    name: str
    number: int  # from the top
    y: int
    num_modules: int

    @property
    def right(self) -> int:
        """Where its bar ends."""
        return MARGIN + BAR + self.number * COLUMN

    @property
    def column(self) -> int:
        """The middle of the bar's last step, on which the imports of this floor land."""
        return self.right - COLUMN // 2

    @property
    def folder(self) -> str:
        """The top-level folder that it lies in."""
        first = self.name.split(".")[0]
        return first if (ROOT / PACKAGE / first).is_symlink() else PACKAGE


def main() -> None:
    """Write the picture."""
    layers, graph = read_layers(), grimp.build_graph(PACKAGE, cache_dir=None)
    home = {module: floor for module in graph.modules if (floor := floor_of(module, layers))}
    imports = Counter(
        (home[module], home[other])
        for module in home
        for other in graph.find_modules_directly_imported_by(module)
        if other in home and home[other] != home[module]
    )
    floors = place(layers, Counter(home.values()))
    PAGE.write_text("\n".join(draw(floors, imports)) + "\n", encoding="utf-8")
    print(f"{PAGE} is written: {len(floors)} floors, {imports.total()} imports between them")  # noqa: T201  a script


def read_layers() -> list[list[str]]:
    """The contract's layers, top first, each of one or more floors that do not know each other."""
    contracts = api.read_configuration(config_filename=str(ROOT / "pyproject.toml"))["contracts_options"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def floor_of(module: str, layers: list[list[str]]) -> str | None:
    """The floor that a module lies on."""
    names = {name for layer in layers for name in layer}
    path = module.split(".")[1:]
    return next((name for end in range(len(path), 0, -1) if (name := ".".join(path[:end])) in names), None)


def place(layers: list[list[str]], num_modules: Counter[str]) -> list[Floor]:
    """Floors from the top down; those of one layer lie close together."""
    floors: list[Floor] = []
    y = TOP
    for layer in layers:
        for name in layer:
            floors.append(Floor(name, len(floors), y, num_modules[name]))
            y += ROW + 1
        y += GAP - 1
    return floors


def draw(floors: list[Floor], imports: Counter[tuple[str, str]]) -> Iterator[str]:
    """The lines of the SVG file: wires first, then bars, then numbers."""
    width, height = floors[-1].right + MARGIN, floors[-1].y + ROW + MARGIN
    label = "The floors of MagicDec from the command line down to errors; all imports between them point down."
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"\n'
        f'     role="img" aria-label="{label}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    yield "  <!-- Written by benchmarks/pages/architecture_picture.py. -->"
    yield f"  <title>{label}</title>\n  <style>{STYLE}  </style>"
    yield f'  <rect class="paper" width="{width}" height="{height}" rx="10"/>'
    yield from header(width)
    for i, above in enumerate(floors):
        right = max((below.column for below in floors[i + 1 :] if imports[above.name, below.name]), default=None)
        if right is not None:
            yield f'  <path class="wire" d="M{above.right} {above.y + ROW // 2} H{right}"/>'
    for floor in floors:
        users = [above.y for above in floors[: floor.number] if imports[above.name, floor.name]]
        if users:
            x, end = floor.column, floor.y
            yield f'  <path class="wire" d="M{x} {users[0] + ROW // 2} V{end - 5}"/>'
            yield f'  <path class="tip" d="M{x - 4} {end - 6} H{x + 4} L{x} {end} z"/>'
    for floor in floors:
        yield from bar(floor)
    for above in floors:
        for below in floors[above.number + 1 :]:
            if count := imports[above.name, below.name]:
                place_at = f'x="{below.column}" y="{above.y + ROW // 2 + 4}"'
                yield f'  <text class="count" {place_at} text-anchor="middle" font-size="12">{count}</text>'
    yield "</svg>"


def header(width: int) -> Iterator[str]:
    """Title, how to read it, and the colours."""
    yield f'  <text x="{MARGIN}" y="34" font-size="16" font-weight="bold">Floors: every import points down</text>'
    how = "A bar's number counts its modules, a number beside it their imports of the floor that its line ends on."
    yield f'  <text class="soft" x="{MARGIN}" y="58">{how}</text>'
    x = width - MARGIN
    for folder in ("plugins", "builder", "runtime", PACKAGE):
        x -= 94
        yield f'  <rect class="{folder}" x="{x}" y="21" width="16" height="16" rx="3"/>'
        yield f'  <text x="{x + 21}" y="34" font-size="12">{folder}/</text>'


def bar(floor: Floor) -> Iterator[str]:
    """Its name, how many modules it has, and the step that imports land on."""
    baseline = floor.y + ROW // 2 + 4
    yield (
        f'  <rect class="{floor.folder}" x="{MARGIN}" y="{floor.y}" width="{floor.right - MARGIN}" '
        f'height="{ROW}" rx="4"/>'
    )
    yield f'  <text x="{MARGIN + 10}" y="{baseline}">{escape(floor.name)}</text>'
    yield (
        f'  <text class="soft" x="{floor.column}" y="{baseline}" font-size="11" text-anchor="middle">'
        f"{floor.num_modules}</text>"
    )


if __name__ == "__main__":
    main()
