"""Measures `magicdec serve` under load and writes the tables of docs/serving-benchmarks.md.

    python benchmarks/pages/measure_serving.py                        everything, a quarter of an hour on two cores
    python benchmarks/pages/measure_serving.py --json serving.json    only write the page again, from an earlier result
    python benchmarks/pages/measure_serving.py -- --part soak         one part; the page keeps the others

Arguments behind -- go to benchmarks/serving/run.py. A part is written only if none of its requests failed.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from frame import DOCS, ROOT, fill, options_of, run

PAGE, SERVING = DOCS / "serving-benchmarks.md", ROOT / "benchmarks" / "serving"


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--json", type=Path, help="result of benchmarks/serving/run.py to use")
    options.add_argument("arguments", nargs="*", help="for benchmarks/serving/run.py, behind --")
    args = options.parse_args()
    result = args.json or ROOT / ".cache" / "benchmarks" / "serving.json"
    if args.json is None:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        run([sys.executable, str(SERVING / "run.py"), "--json", str(result), *args.arguments])
    write(PAGE, result)


def write(page: Path, result: Path) -> None:
    """Replace what stands between the marks of each part that the result has."""
    sys.path.insert(0, str(SERVING))
    tables = import_module("table").markdown(json.loads(result.read_text(encoding="utf-8")))
    for part, table in tables.items():
        fill(page, marks(part), table)


def marks(part: str) -> tuple[str, str]:
    """What stands before and after the table of a part."""
    return f"<!-- begin of {part} -->", f"<!-- end of {part} -->"


if __name__ == "__main__":
    main()
