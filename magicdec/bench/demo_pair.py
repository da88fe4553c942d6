"""The demo's engine and text, which benchmarks use as well."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from magicdec.console import StageBars, err, read_text
from magicdec.errors import EngineError

if TYPE_CHECKING:
    from magicdec.pair.config import PairConfig

CONFIG = "smollm2-135m-self"


def read_long_text(path: Path | None) -> str:
    """The user's text, or the topics that `help()` shows, which every Python carries."""
    if path is not None:
        return read_text(path)
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prepare_engine(
    cache_dir: Path,
    dtype: Literal["float32", "bfloat16"],
    num_tokens: int,
    *,
    quantize_draft: Literal["int4"] | None = None,
) -> Path:
    """The demo's engine, built unless a whole one is there already. num_tokens: of the sequence to come."""
    from magicdec.builder.build import build_pair
    from magicdec.builder.checkpoints.fetch import fetch_smollm2
    from magicdec.builder.config import load_config, resolve_config
    from magicdec.pair.config import PairConfig

    config = resolve_config(load_config(CONFIG), kind="self", dtype=dtype, quantize_draft=quantize_draft)
    directory = cache_dir / "engines" / f"demo-{dtype}{f'-{quantize_draft}' if quantize_draft else ''}"
    if num_tokens > config.max_seq_len:
        err().print(
            f"[bold yellow]Note:[/] {num_tokens:,} tokens are more than the {config.max_seq_len:,} that this model was "
            "trained on; times and acceptance mean something there, its answer does not."
        )
        longer = {"max_seq_len": num_tokens, "beyond_trained_len": True}
        config = PairConfig.model_validate(config.model_dump() | longer)
        directory = directory.with_name(f"{directory.name}-{num_tokens}")
    if not is_built(directory, config):
        with StageBars() as bars:
            checkpoint = fetch_smollm2(cache_dir / "models", bars)
            build_pair(checkpoint, "self", config, directory, overwrite=True, on_progress=bars)
    return directory


def is_built(directory: Path, config: "PairConfig") -> bool:
    """Whether a whole engine of this very configuration is there."""
    from magicdec.pair.manifest import load_engine, load_pair

    try:
        pair = load_pair(directory).config
        for role in pair.roles:
            load_engine(directory / role)
        return pair == config
    except EngineError:
        return False


def default_engine(
    cache_dir: Path, dtype: Literal["bfloat16", "float32"], longest_context: int, output_tokens: int
) -> Path:
    """The demo's with an int4 draft; past the trained length one that is built for whole multiples of 8k tokens."""
    from magicdec.builder.config import load_config

    limit = load_config(CONFIG).max_seq_len
    if longest_context <= limit:
        return prepare_engine(cache_dir, dtype, limit, quantize_draft="int4")
    needed = longest_context + 2 * output_tokens + 64
    return prepare_engine(cache_dir, dtype, -(-needed // limit) * limit, quantize_draft="int4")
