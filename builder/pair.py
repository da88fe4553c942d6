"""Whether a target and a draft go together, decided before any heavy work is done."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.builder.memory import GPU_BYTES, USABLE_FRACTION, memory_need
from magicdec.builder.shard import check_tp
from magicdec.builder.storage import Storage, disk_bytes
from magicdec.builder.tokenizer import TokenizerInfo
from magicdec.errors import BuildError, CheckpointError, ConfigError, PairError
from magicdec.pair.config import PairConfig, Role
from magicdec.plugins.weight_only import GROUP

logger = logging.getLogger("magicdec.builder")
_CHOOSE = "Choose a draft of the target's family, or --draft self or ngram, which need none."
# Tokenizer files, manifests and what the file system itself needs.
_DISK_SLACK = 64 << 20


@dataclass(frozen=True)
class Side:
    """One model of a pair, as far as the checks look at it. role: "target" or "draft"."""

    role: Role
    path: Path
    spec: ModelSpec
    tokenizer: TokenizerInfo

    @property
    def vocab_size(self) -> int:
        """Usable token ids: those of the tokenizer that the model has rows for. More rows are padding."""
        return min(self.tokenizer.size, self.spec.vocab_size)


def check_pair(config: PairConfig, target: Side, draft: Side | None, output: Path | None) -> None:
    """All checks; `draft` is None unless a draft/ is built. The output's folder must exist; None: no disk is looked at.

    PairError: tokenizers differ, or the draft was trained for too short a sequence. ConfigError: max_seq_len, tp_size
    or the GPU's memory do not fit. BuildError: too little free disk.
    """
    sides = [target] if draft is None else [target, draft]
    for side in sides:
        if side.vocab_size < side.tokenizer.size:
            tokens, rows = side.tokenizer.size, side.spec.vocab_size
            logger.warning(
                "the %s's tokenizer has %d ids, its model %d: ids beyond are refused", side.role, tokens, rows
            )
        check_tp(side.spec, config.tp_size_of(side.role), side.role)
    if draft is not None:
        check_tokenizers(target, draft)
        _check_groups(config, draft)
    if draft is not None and config.has_draft_cache:
        _check_draft_length(config, draft)
    _check_target_length(config, target)
    _check_memory(config, target.spec, draft.spec if draft is not None else None)
    if output is not None:
        _check_disk(config, sides, output)


def check_tokenizers(target: Side, draft: Side) -> None:
    """PairError unless every usable token id is the same token to both; rows beyond the tokenizer may differ."""
    ours, theirs = target.tokenizer, draft.tokenizer
    first = _first_difference(target, draft)
    if target.vocab_size != draft.vocab_size:
        where = "" if first is None else f" (first difference: {first})"
        raise PairError(
            f"The tokenizers differ: {target.path} has {target.vocab_size} usable token ids, {draft.path} has "
            f"{draft.vocab_size}{where}. A draft proposes token ids, so both must mean the same by each. {_CHOOSE}"
        )
    if first is not None:
        raise PairError(f"The tokenizers of {target.path} and {draft.path} differ: {first}. {_CHOOSE}")
    if ours.special != theirs.special:
        ids = ", ".join(str(index) for index in sorted(ours.special ^ theirs.special)[:5])
        logger.warning("token ids %s are special to only one of the two tokenizers; the target's decides", ids)
    if ours.eos_id != theirs.eos_id:
        logger.warning("the draft's end token is %s, the target's %s; the target's decides", theirs.eos_id, ours.eos_id)


def _first_difference(target: Side, draft: Side) -> str | None:
    ours, theirs = target.tokenizer, draft.tokenizer
    for index in range(min(target.vocab_size, draft.vocab_size)):
        if ours.tokens.get(index) != theirs.tokens.get(index):
            kind = "special token id" if index in ours.special | theirs.special else "token id"
            mine, other = ours.tokens.get(index), theirs.tokens.get(index)
            return f"{kind} {index} is {mine!r} in the target and {other!r} in the draft"
    return None


def _check_draft_length(config: PairConfig, draft: Side) -> None:
    """The farthest a draft's query ever looks back must be a distance that the draft has been trained for."""
    trained = draft.spec.max_position_embeddings
    if config.draft.resolved_sink_positions == "absolute":
        if config.max_seq_len > trained:
            raise PairError(
                f"{draft.path} was trained for {trained} positions, and with sink_positions 'absolute' its first "
                f"tokens stay up to max_seq_len {config.max_seq_len} positions back. Use sink_positions in_cache, or "
                f"max_seq_len at most {trained}."
            )
        return
    block = config.block_size
    reach = min(config.draft_budget + config.draft.max_draft_len, config.max_seq_len)
    if reach > trained:
        sinks = config.draft_budget - config.draft.window_size - 2 * block
        window = (trained - config.draft.max_draft_len - sinks - 2 * block) // block * block
        mend = f"Use a window_size of at most {window}." if window > 0 else "Choose another draft."
        raise PairError(
            f"{draft.path} was trained for {trained} positions, but sinks {sinks} + window {config.draft.window_size} "
            f"+ spare blocks {2 * block} + draft length {config.draft.max_draft_len} make {reach}. {mend}"
        )


def _check_groups(config: PairConfig, draft: Side) -> None:
    """Each row of a matrix must be whole groups of int4 numbers."""
    if config.quantization.weight_only_draft != "int4":
        return
    spec = draft.spec
    sizes = {
        "hidden size": spec.hidden_size,
        "attention width": spec.num_heads * spec.head_size,
        "intermediate size": spec.intermediate_size,
    }
    for name, size in sizes.items():
        if size % GROUP:
            raise ConfigError(
                f"quantization.draft 'int4': the {name} {size} of {draft.path} is no multiple of {GROUP}, the columns "
                "that share a scale; use int8 (--quantize-draft int8)"
            )


def _check_target_length(config: PairConfig, target: Side) -> None:
    trained = target.spec.max_position_embeddings
    if config.max_seq_len <= trained:
        return
    if not config.beyond_trained_len:
        raise ConfigError(
            f"max_seq_len {config.max_seq_len} is more than the {trained} positions that {target.path} was trained "
            f"for, and answers degrade there. Use at most {trained}, or set beyond_trained_len: true (for timing)."
        )
    logger.warning("max_seq_len %d is beyond the target's trained length %d, as asked", config.max_seq_len, trained)


def _check_memory(config: PairConfig, target: ModelSpec, draft: ModelSpec | None) -> None:
    if config.gpu is None:
        return
    need, memory = memory_need(config, target, draft), int(GPU_BYTES[config.gpu] * USABLE_FRACTION)
    if need.minimum > memory:
        raise ConfigError(
            f"This pair does not fit on {config.gpu} with tp_size {config.tp_size}: each GPU needs "
            f"{_gib(need.minimum)} (weights {_gib(need.weights)}, KV of one sequence of max_seq_len "
            f"{config.max_seq_len} {_gib(need.kv_sequence)}, draft KV {_gib(need.draft_kv)}, workspace "
            f"{_gib(need.workspace)}) of {_gib(memory)} usable. Raise tp_size or lower max_seq_len."
        )
    fitting = need.sequences_in(memory)
    if fitting < config.max_batch_size:
        text = "%s holds %d sequences of max_seq_len %d at once; more of max_batch_size %d run when they are shorter"
        logger.warning(text, config.gpu, fitting, config.max_seq_len, config.max_batch_size)


def _check_disk(config: PairConfig, sides: list[Side], output: Path) -> None:
    weights = sum(disk_bytes(side.spec, config.tp_size_of(side.role), Storage.of(config, side.role)) for side in sides)
    # A compiled engine holds the weights once more.
    need = weights * (2 if config.backend == "trtllm" else 1) + _DISK_SLACK
    free = shutil.disk_usage(output.parent).free
    if free < need:
        raise BuildError(
            f"{output}: the engine needs {_gib(need)} and its disk has {_gib(free)} free. Free some space, or give an "
            "--output on another disk."
        )


def resolve_eos(side: Side) -> list[int]:
    """End-of-text ids: those of the configuration, else the tokenizer's; empty if neither names one.

    CheckpointError if an id is no usable token.
    """
    ids = list(side.spec.eos_token_ids)
    if not ids and side.tokenizer.eos_id is not None:
        ids = [side.tokenizer.eos_id]
    for token in ids:
        if not 0 <= token < side.vocab_size:
            raise CheckpointError(
                f"{side.path}: eos_token_id {token} is not one of the {side.vocab_size} token ids. Correct it in "
                "generation_config.json."
            )
    if not ids:
        logger.warning("%s names no end-of-text token: generation ends at max_tokens or a stop string only", side.path)
    return ids


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
