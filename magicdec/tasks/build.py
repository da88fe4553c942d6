"""Building a pair with bars, and showing how TensorRT-LLM would build it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from magicdec.console import StageBars, err, out, shown_warnings
from magicdec.errors import ConfigError

if TYPE_CHECKING:
    from magicdec.pair.config import PairConfig

Draft = Path | Literal["self", "ngram"]


def build_engine(
    target: Path, draft: str, config: str, changes: Mapping[str, Any], output: Path, how: Mapping[str, Any]
) -> None:
    """Build `output`, and say what comes next. changes: of `resolve_config`; how: of `build_pair`."""
    from magicdec.builder.build import build_pair

    with shown_warnings(), StageBars() as bars:
        source = _draft(draft)
        resolved = _resolved(config, source, changes)
        build_pair(target, source, resolved, output, on_progress=bars, **how)
    err().print(f"Built {output}{_ranks(resolved)}. Next: magicdec inspect {output}", soft_wrap=True)


def show_plans(target: Path, draft: str, config: str, changes: Mapping[str, Any]) -> None:
    """Check the pair and print how TensorRT-LLM would build it; nothing is built. changes: of `resolve_config`."""
    from magicdec.builder.build import plan_pair

    with shown_warnings():
        source = _draft(draft)
        plans = plan_pair(target, source, _resolved(config, source, changes))
        if not plans:
            raise ConfigError(
                "--dry-run shows how TensorRT-LLM would build, and the backend is torch; add --backend trtllm"
            )
        for plan in plans.values():
            for line in plan.lines():
                out().print(line, markup=False, soft_wrap=True)


def _resolved(config: str, source: Draft, changes: Mapping[str, Any]) -> "PairConfig":
    from magicdec.builder.config import load_config, resolve_config

    return resolve_config(load_config(config), kind="model" if isinstance(source, Path) else source, **changes)


def _ranks(config: "PairConfig") -> str:
    if config.tp_size == 1:
        return ""
    draft = f", its draft for {config.tp_size_of('draft')}" if config.draft.kind == "model" else ""
    return f" for {config.tp_size} ranks{draft}"


def _draft(text: str) -> Draft:
    if text == "self":
        return "self"
    return "ngram" if text == "ngram" else Path(text)
