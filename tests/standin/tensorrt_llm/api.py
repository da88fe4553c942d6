"""The interface's names, arguments and defaults, from `api.json`."""

import json
from pathlib import Path
from typing import Any

API: dict[str, Any] = json.loads((Path(__file__).parent.parent / "api.json").read_text())
SYMBOLS: dict[str, Any] = API["symbols"]


def arguments(symbol: str, given: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The given arguments over the defaults; TypeError for unknown or missing ones. names: what defaults mention."""
    declared = SYMBOLS[symbol]
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise TypeError(f"{symbol} has no argument {unknown}")
    missing = [name for name, default in declared.items() if default == "__required__" and name not in given]
    if missing:
        raise TypeError(f"{symbol} needs {missing}")
    defaults = {name: eval(text, names) for name, text in declared.items() if name not in given}
    return {name: given.get(name, defaults.get(name)) for name in declared}
