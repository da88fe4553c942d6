"""Parameters of `tensorrt_llm` in its config.pbtxt: where the engine is, and how it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from magicdec.errors import ConfigError

# By the name in config.pbtxt: the TensorRT-LLM backend's where it has one.
NAMES: Final = {
    "engine_dir": "gpt_model_path",
    "exclude_input_in_output": "exclude_input_in_output",
    "cancellation_check_period_ms": "cancellation_check_period_ms",
    "stats_check_period_ms": "stats_check_period_ms",
    "max_queue_size": "max_queue_size",
    "kv_cache_tokens": "max_tokens_in_paged_kv_cache",
    "num_draft_tokens": "num_draft_tokens",
    "drafter": "drafter",
    "dtype": "dtype",
    "device": "device",
}
_TRITONS_OWN: Final = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}
_ENGINE_OPTIONS: Final = ("kv_cache_tokens", "num_draft_tokens", "drafter", "dtype", "device")


@dataclass(frozen=True)
class LLMParameters:
    """What `tensorrt_llm` is configured with; None is the engine's own."""

    engine_dir: Path
    exclude_input_in_output: bool = False
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100
    max_queue_size: int = 256  # requests that are open at once, each row of a batch counted
    kv_cache_tokens: int | None = None
    num_draft_tokens: int | str | None = None
    drafter: str | None = None
    dtype: str | None = None
    device: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "LLMParameters":
        """ConfigError names the parameter that is unknown or no value of its kind."""
        own = {name: key for key, name in NAMES.items()}
        for name in given.keys() - _TRITONS_OWN:
            if name not in own:
                raise ConfigError(f"parameter {name} is not supported; take it out of config.pbtxt of tensorrt_llm")
        if NAMES["engine_dir"] not in given:
            raise ConfigError(f"parameter {NAMES['engine_dir']} is missing: it names the engine's directory")
        values = {own[name]: _value(name, own[name], text) for name, text in given.items() if name in own}
        return cls(**values)

    def engine_options(self) -> dict[str, Any]:
        """What `LLM` is opened with besides the directory."""
        return {name: getattr(self, name) for name in _ENGINE_OPTIONS if getattr(self, name) is not None}

    def texts(self) -> dict[str, str]:
        """The parameters as config.pbtxt holds them; empty where the engine's own holds."""
        values = {name: getattr(self, key) for key, name in NAMES.items()}
        return {name: "" if value is None else str(value) for name, value in values.items()}


def _value(name: str, key: str, text: str) -> Any:
    kinds: dict[str, Callable[[str], Any]] = {
        "engine_dir": Path,
        "exclude_input_in_output": _boolean,
        "num_draft_tokens": lambda text: "auto" if text == "auto" else int(text),
        "drafter": str,
        "dtype": str,
        "device": str,
    }
    try:
        return kinds.get(key, int)(text)
    except ValueError:
        raise ConfigError(
            f"parameter {name} is {text!r} in config.pbtxt of tensorrt_llm, which is no value for it"
        ) from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")
