"""PluginConfig, from the interface's list; and the workspace of all-reduce."""

from typing import Any

import torch

from ..api import arguments
from ..mapping import Mapping

_NAME = "tensorrt_llm.plugin.plugin.PluginConfig"


class PluginConfig:
    """Values over the defaults. "auto" becomes dtype when read. Unlike the real one, unknown names are refused."""

    def __init__(self, **given: Any) -> None:
        self.__dict__["_values"] = arguments(_NAME, given, {})

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"PluginConfig has no {name!r}")
        return values["dtype"] if values[name] == "auto" and name != "dtype" else values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__["_values"]:
            raise AttributeError(f"PluginConfig has no {name!r}")
        self.__dict__["_values"][name] = value

    def __deepcopy__(self, _memo: Any) -> "PluginConfig":
        return PluginConfig(**self.__dict__["_values"])

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dict__["_values"]}


class CustomAllReduceHelper:
    """The workspace is an input of engines of several ranks; its contents mean nothing here."""

    @staticmethod
    def max_workspace_size_auto(tp_size: int, support_deterministic: bool = True) -> int:
        return 8_000_000 if tp_size > 2 else 16_000_000

    @staticmethod
    def allocate_workspace(
        mapping: Mapping, size: int, is_p2p_supported: bool = True
    ) -> tuple[list[Any], torch.Tensor]:
        """(buffers, workspace [7 * tp + 3] of int64)."""
        return [], torch.zeros(7 * mapping.tp_size + 3, dtype=torch.int64)
