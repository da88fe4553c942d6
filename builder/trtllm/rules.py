"""What TensorRT-LLM 1.2 would refuse, or change without a word, and why that cannot be taken; said before a build."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from magicdec.errors import ConfigError
from magicdec.pair.config import PairConfig, Role

Checkpoints = Mapping[Role, Mapping[str, Any]]
Rule = Callable[[PairConfig, Checkpoints, int | None], Iterator[str]]
FP8_SM: Final = 89
# Types that fused context attention has kernels for.
FMHA_DTYPES: Final = {"float16", "bfloat16"}
BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
LARGE_NUM_TOKENS: Final = 16384
_VERIFIES: Final = "several draft tokens could then no longer be verified in one pass"


def check_rules(config: PairConfig, checkpoints: Checkpoints, sm: int | None) -> None:
    """ConfigError with every rule that is broken. sm: compute capability (90 = 9.0), None = not known yet."""
    broken = [text for rule in _RULES for text in rule(config, checkpoints, sm)]
    if broken:
        raise ConfigError("TensorRT-LLM cannot build this pair:\n" + "\n".join(f"- {text}" for text in broken))


def notes(config: PairConfig, role: Role, checkpoint: Mapping[str, Any], sm: int | None) -> tuple[str, ...]:
    """What is worth knowing about an engine and stops nothing."""
    found = []
    max_seq_len = config.max_seq_len if role == "target" else config.draft_budget
    most = config.max_batch_size * max_seq_len
    if config.max_num_tokens > most:
        found.append(f"max_num_tokens {config.max_num_tokens} is lowered to {most}, all that the sequences hold")
    if min(config.max_num_tokens, most) > LARGE_NUM_TOKENS:
        found.append(f"max_num_tokens above {LARGE_NUM_TOKENS} seldom pays, TensorRT-LLM warns of it")
    group = checkpoint["num_attention_heads"] // checkpoint["num_key_value_heads"]
    if group & (group - 1):
        found.append(f"{group} query heads share a KV head, no power of two: slower generation kernels (no XQA)")
    if sm is None:
        found.append("gpu is not named: what depends on it is checked on the machine that builds")
    return tuple(found)


def _dtype(_config: PairConfig, checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    for role, checkpoint in checkpoints.items():
        if checkpoint["dtype"] not in FMHA_DTYPES:
            yield (
                f"dtype {checkpoint['dtype']!r} of the {role}: fused context attention has kernels for 16-bit types "
                "only, and TensorRT-LLM would fall back to one that does not look at cached keys, with a warning in "
                f"its log; {_VERIFIES}. Use --dtype bfloat16."
            )


def _sm80(_config: PairConfig, _checkpoints: Checkpoints, sm: int | None) -> Iterator[str]:
    if sm is not None and sm < 80:
        yield (
            f"compute capability {sm / 10:.1f}: paged context attention needs 8.0 (A100) or newer; {_VERIFIES}. "
            "Build on an A100, H100 or H200."
        )


def _fp8_hardware(_config: PairConfig, checkpoints: Checkpoints, sm: int | None) -> Iterator[str]:
    for role, checkpoint in checkpoints.items():
        algorithms = checkpoint["quantization"]
        if sm is not None and sm < FP8_SM and "FP8" in (algorithms["quant_algo"], algorithms["kv_cache_quant_algo"]):
            yield (
                f"FP8 of the {role} on compute capability {sm / 10:.1f}: FP8 arithmetic needs 8.9 or newer; with an "
                f"FP8 KV cache TensorRT-LLM would turn paged context attention off, and {_VERIFIES}. Leave "
                "quantization and kv_cache_dtype fp8 out, or build for h100-80gb or h200."
            )


def _fp8_cache(_config: PairConfig, checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    for role, checkpoint in checkpoints.items():
        weights, cache = (checkpoint["quantization"][key] for key in ("quant_algo", "kv_cache_quant_algo"))
        if cache == "FP8" and weights != "FP8":
            yield (
                f"an FP8 KV cache of the {role} with weights in {checkpoint['dtype']}: TensorRT-LLM would turn paged "
                f"context attention off, and {_VERIFIES}. Quantize the {role}'s weights to fp8 too, or use "
                "kv_cache_dtype auto."
            )
        if cache == "INT8":
            yield (
                f"an INT8 KV cache of the {role}: TensorRT-LLM would turn paged context attention off, and "
                f"{_VERIFIES}. Use kv_cache_dtype fp8 or auto."
            )


def _num_tokens(config: PairConfig, _checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    need = config.max_batch_size * (config.draft.max_draft_len + 1)
    if config.max_num_tokens < need:
        yield (
            f"max_num_tokens {config.max_num_tokens} is less than max_batch_size * (max_draft_len + 1) = "
            f"{config.max_batch_size} * ({config.draft.max_draft_len} + 1) = {need}: TensorRT-LLM would raise it to "
            f"{need}, and with it the memory of each step. Use max_num_tokens {need}, or lower draft.max_draft_len."
        )
    if config.max_num_tokens < config.block_size:
        yield (
            f"max_num_tokens {config.max_num_tokens} is less than block_size {config.block_size}: TensorRT-LLM would "
            f"raise it to {config.block_size}. Use at least that."
        )


def _block_size(config: PairConfig, _checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    if config.block_size not in BLOCK_SIZES:
        near = min(BLOCK_SIZES, key=lambda size: abs(size - config.block_size))
        yield (
            f"block_size {config.block_size} (TensorRT-LLM's tokens_per_block): it must be a power of two, and the "
            f"generation kernels take {', '.join(map(str, BLOCK_SIZES))} only. Use {near}."
        )


def _draft_length(config: PairConfig, checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    """The draft engine holds its budget and no more; TensorRT-LLM only warns where it is longer than the model."""
    checkpoint = checkpoints.get("draft")
    if checkpoint is None or config.beyond_trained_len:
        return
    trained = _reach(checkpoint)
    if config.draft_budget > trained:
        block, window = config.block_size, config.draft.window_size
        most = max(window - (config.draft_budget - trained), 0) // block * block
        yield (
            f"the draft engine's max_seq_len is its budget of {config.draft_budget} tokens (sinks, window_size "
            f"{window} and two spare blocks of {block}), and the draft model was trained for {trained}: TensorRT-LLM "
            f"would warn and build it. Lower draft.window_size to at most {most}."
        )


def _tensor_parallel(_config: PairConfig, checkpoints: Checkpoints, _sm: int | None) -> Iterator[str]:
    for role, checkpoint in checkpoints.items():
        mapping, heads = checkpoint["mapping"], checkpoint["num_attention_heads"]
        if mapping["world_size"] != mapping["tp_size"] or mapping.get("pp_size", 1) != 1:
            yield f"the {role}'s mapping {dict(mapping)}: only tensor parallelism is supported here. Use --tp."
        elif heads % mapping["tp_size"]:
            yield f"tp_size {mapping['tp_size']} does not divide the {role}'s {heads} attention heads. Use a divisor."


def _reach(checkpoint: Mapping[str, Any]) -> int:
    """Trained length as TensorRT-LLM reckons it: a linear scaling stretches it, llama3's already counts."""
    scaling = checkpoint["rotary_scaling"] or {}
    linear = scaling.get("rope_type", scaling.get("type")) == "linear"
    return int(checkpoint["max_position_embeddings"] * (scaling["factor"] if linear else 1))


_RULES: Final[tuple[Rule, ...]] = (
    _dtype,
    _sm80,
    _fp8_hardware,
    _fp8_cache,
    _num_tokens,
    _block_size,
    _draft_length,
    _tensor_parallel,
)
