"""PluginConfig, from the interface's list; and the workspace of all-reduce."""

from typing import Any

import torch

from ..api import SYMBOLS, arguments
from ..mapping import Mapping

_NAME = "tensorrt_llm.plugin.plugin.PluginConfig"


# What options of these names may hold; any other that ends in _plugin holds _DTYPES, and a flag True or False.
_DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", None)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "gemm_plugin": (*_DTYPES, "fp8", "nvfp4"),
    "gemm_swiglu_plugin": ("fp8", None),
    "low_latency_gemm_plugin": ("fp8", None),
    "low_latency_gemm_swiglu_plugin": ("fp8", None),
    "gemm_allreduce_plugin": ("float16", "bfloat16", None),
    "paged_kv_cache": (True, False, None),
}


class PluginConfig:
    """Values over the defaults. "auto" becomes dtype when read. Unlike the real one, unknown names are refused."""

    def __init__(self, **given: Any) -> None:
        self.__dict__["_values"] = {}
        for name, value in arguments(_NAME, given, {}).items():
            self._check(name, value)
            self.__dict__["_values"][name] = value

    @staticmethod
    def _check(name: str, value: Any) -> None:
        if name == "dtype":
            assert value in _DTYPES[1:-1], value
        elif name == "tokens_per_block":
            assert isinstance(value, int), value
        else:
            is_flag = isinstance(SYMBOLS[_NAME][name], str) and SYMBOLS[_NAME][name] in ("True", "False")
            choices = _CHOICES.get(name, (True, False) if is_flag else _DTYPES)
            if value not in choices:
                raise ValueError(f"PluginConfig.{name}: {value!r} is none of {choices}")

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"PluginConfig has no {name!r}")
        return values["dtype"] if values[name] == "auto" and name != "dtype" else values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__["_values"]:
            raise AttributeError(f"PluginConfig has no {name!r}")
        self._check(name, value)
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
