"""Reading a pair configuration (YAML) with errors that name the file, the key, the value and the mend."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from magicdec.errors import ConfigError
from magicdec.pair.config import (
    BackendName,
    DraftConfig,
    DraftKind,
    DtypeName,
    KvDtypeChoice,
    PairConfig,
    QuantizationConfig,
    WeightQuantization,
)

CONFIG_DIR = Path(__file__).parent.parent / "configs"


def config_names() -> list[str]:
    """Names of the configurations that come with the package, without .yaml."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))


def load_config(path_or_name: Path | str) -> PairConfig:
    """Read a YAML file, or one that comes with the package by its name (`smollm2-135m-self`).

    ConfigError names the file, the key and the value for anything that cannot be used, unknown keys included.
    """
    path = _find(Path(path_or_name))
    values = _read_yaml(path)
    try:
        return PairConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from error


def resolve_config(
    config: PairConfig,
    *,
    kind: DraftKind,
    dtype: DtypeName | None = None,
    tp_size: int | None = None,
    backend: BackendName | None = None,
    quantize_target: WeightQuantization | None = None,
    quantize_draft: WeightQuantization | None = None,
    kv_cache_dtype: KvDtypeChoice | None = None,
    draft_kv_cache_dtype: KvDtypeChoice | None = None,
    draft_tp_size: int | None = None,
) -> PairConfig:
    """The configuration as it is built: the kind of draft, and whatever else the caller decided on (not None).

    Settings of the draft that were meant for another kind (sink_positions, quantization, KV dtype, ranks) are dropped.
    """
    values = config.model_dump()
    if kind != config.draft.kind:
        values["draft"] |= {"kind": kind, "sink_positions": None, "kv_cache_dtype": "auto", "tp_size": None}
        values["quantization"]["draft"] = None
    if kind != "model":
        values["draft_model"] = None
    values |= _given(dtype=dtype, tp_size=tp_size, backend=backend, kv_cache_dtype=kv_cache_dtype)
    values["quantization"] |= _given(target=quantize_target, draft=quantize_draft)
    values["draft"] |= _given(kv_cache_dtype=draft_kv_cache_dtype, tp_size=draft_tp_size)
    try:
        return PairConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{config.name}: {line}" for line in lines)) from error


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    known = CONFIG_DIR / f"{path}.yaml"
    if path.parent == Path() and known.is_file():
        return known
    what = "is a directory" if path.is_dir() else "does not exist"
    raise ConfigError(f"{path} {what}. Give a YAML file, or one of: {', '.join(config_names())}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        what = "nothing" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{path} holds {what} where keys with values (name: ..., draft: ...) belong.")
    return values


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _explain(detail: ErrorDetails) -> str:
    """One line: key, value, what is wrong, mend."""
    key = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key (value {detail['input']!r}){_suggestion(key)}"
    if detail["type"] == "missing":
        return f"{key}: missing; add it"
    if not key or isinstance(detail["input"], dict):
        # A check of several keys together, whose message names them and the mend.
        return f"{key}: {message}" if key else message
    return f"{key}: {detail['input']!r}: {message}"


def _suggestion(key: str) -> str:
    section = key.rpartition(".")[0]
    fields = {"draft": DraftConfig.model_fields, "quantization": QuantizationConfig.model_fields}.get(
        section, PairConfig.model_fields
    )
    close = difflib.get_close_matches(key.rpartition(".")[2], list(fields), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(fields)}"
