"""What an engine directory holds and what it needs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from magicdec.console import err, facts, format_bytes, out
from magicdec.errors import EngineError

if TYPE_CHECKING:
    from magicdec.pair.config import PairConfig, Role
    from magicdec.pair.manifest import EngineManifest
    from magicdec.pair.memory import MemoryPlan

DRAFT_KINDS = {
    "model": "a separate draft model with a cyclic cache",
    "self": "the target itself through a bounded window on its own cache",
    "ngram": "prompt lookup, no model",
}
SELF_DRAFTS = {
    "int8": "the target's weights in int8 through a bounded window on its cache",
    "int4": "the target's weights in int4 through a bounded window on its cache",
}
LINEAR_LAYERS = {
    "FP8": "FP8 (E4M3)",
    "W8A16": "int8 weights",
    "W4A16": "int4 weights (embedding and output matrix int8)",
}


def show_engine(directory: Path, *, context: int | None, batch: int, verify: bool, as_json: bool) -> None:
    """Print tables, or one JSON object. context None: max_seq_len. verify: compare every file with its SHA-256."""
    from magicdec.pair.manifest import check_hashes, load_engine, load_pair
    from magicdec.pair.memory import plan_memory

    config = load_pair(directory).config
    engines = {role: load_engine(directory / role) for role in config.roles}
    if verify:
        for role in config.roles:
            check_hashes(directory / role)
    context = config.max_seq_len if context is None else context
    if context > config.max_seq_len:
        raise EngineError(
            f"--context {context} is more than the max_seq_len {config.max_seq_len} that {directory} was built with; "
            "ask for less, or build it again with a larger max_seq_len"
        )
    plan = plan_memory(directory, config, context=context, batch_size=batch)
    if as_json:
        typer.echo(json.dumps(_as_dict(config, engines, plan, context, batch), indent=1))
    else:
        _print_tables(directory, config, engines, plan, context, batch)
    if verify:
        err().print("All files match their SHA-256.")


def _as_dict(
    config: "PairConfig", engines: "Mapping[Role, EngineManifest]", plan: "MemoryPlan", context: int, batch: int
) -> dict[str, Any]:
    return {
        "config": config.model_dump(),
        "engines": {role: manifest.model_dump() for role, manifest in engines.items()},
        "memory": {"context": context, "batch": batch, **vars(plan), "total": plan.total},
    }


def _print_tables(
    directory: Path,
    config: "PairConfig",
    engines: "Mapping[Role, EngineManifest]",
    plan: "MemoryPlan",
    context: int,
    batch: int,
) -> None:
    console = out()
    console.print(facts(f"{config.name} ({directory})", _pair_rows(config)))
    for role, manifest in engines.items():
        console.print(facts(role.capitalize(), _engine_rows(directory / role, config, manifest)))
    title = f"Memory for {batch} x {context:,} tokens"
    console.print(facts(title, _memory_rows(config, plan)))


def _pair_rows(config: "PairConfig") -> list[tuple[str, str]]:
    draft, view = config.draft, config.draft_view_tokens
    kind = DRAFT_KINDS[draft.kind]
    if draft.kind == "self" and config.quantization.weight_only_draft is not None:
        kind = SELF_DRAFTS[config.quantization.weight_only_draft]
    rows = [("draft", f"{draft.kind}: {kind}")]
    if view is not None:
        rows.append(("draft window", f"{draft.window_size} recent tokens + {draft.num_sink_tokens} sinks"))
        rows.append(("draft sees", f"at most {view} tokens (whole blocks of {config.block_size})"))
        rows.append(("sink positions", draft.resolved_sink_positions))
    else:
        rows.append(("n-grams", f"{draft.ngram_min} to {draft.ngram_max} tokens"))
    return [
        *rows,
        ("draft tokens a round", f"{draft.num_draft_tokens} (at most {draft.max_draft_len})"),
        ("dtype", config.dtype),
        (
            "limits",
            f"max_batch_size {config.max_batch_size}, max_seq_len {config.max_seq_len:,}, "
            f"max_num_tokens {config.max_num_tokens:,}",
        ),
        ("tensor-parallel ranks", _ranks(config)),
        ("GPU", config.gpu or "none in particular"),
    ]


def _ranks(config: "PairConfig") -> str:
    draft = f", draft {config.tp_size_of('draft')}" if config.draft.kind == "model" else ""
    return f"{config.tp_size}{draft}"


def _engine_rows(directory: Path, config: "PairConfig", manifest: "EngineManifest") -> list[tuple[str, str]]:
    from magicdec.pair.memory import kv_bytes_per_token

    own_cache = manifest.role == "target" or config.has_draft_cache
    per_token = kv_bytes_per_token(directory, config.kv_cache_dtype_of(manifest.role))
    cache: str = "FP8 (E4M3)" if manifest.kv_cache_quant_algo else manifest.dtype
    return [
        ("source", f"{manifest.source} ({manifest.source_format})"),
        ("architecture", f"{manifest.architecture}, {manifest.num_parameters:,} parameters, {manifest.dtype}"),
        ("linear layers", LINEAR_LAYERS[manifest.quant_algo] if manifest.quant_algo else manifest.dtype),
        ("KV cache", cache if own_cache else "the target's"),
        ("vocabulary", f"{manifest.vocab_size:,} ids, end of sequence {manifest.eos_token_ids}"),
        ("trained length", f"{manifest.trained_len:,} tokens"),
        ("files", f"{len(manifest.files)}, {format_bytes(sum(file.bytes for file in manifest.files.values()))}"),
        ("KV a token", format_bytes(per_token) if own_cache else "none"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _memory_rows(config: "PairConfig", plan: "MemoryPlan") -> list[tuple[str, str]]:
    note = {
        "model": " (the same for every context)",
        "self": " (reads the target's blocks)",
        "ngram": "",
    }[config.draft.kind]
    return [
        ("target weights", format_bytes(plan.target_weights)),
        ("draft weights", format_bytes(plan.draft_weights)),
        ("target KV", format_bytes(plan.target_kv)),
        ("draft KV", format_bytes(plan.draft_kv) + note),
        ("total", format_bytes(plan.total)),
    ]
