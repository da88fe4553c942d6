"""How many bytes an engine pair takes, on disk and on each GPU; integers only, no model is loaded."""

from dataclasses import dataclass

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.builder.shard import local_kv_heads
from magicdec.builder.storage import DTYPE_BYTES, Storage, rank_bytes
from magicdec.pair.config import GpuName, KvDtypeName, PairConfig

# What drivers report for these cards differs by a few hundred MiB; this is just below the lowest.
GPU_BYTES: dict[GpuName, int] = {"a100-80gb": 79 << 30, "h100-80gb": 79 << 30, "h200": 139 << 30}
# Left to the driver, to kernels' own buffers and to fragmentation.
USABLE_FRACTION = 0.92


def rank_kv_bytes_per_token(spec: ModelSpec, dtype: KvDtypeName, tp_size: int) -> int:
    """Bytes of keys and values of one token on one rank."""
    return 2 * spec.num_layers * local_kv_heads(spec, tp_size) * spec.head_size * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one rank. kv_sequence: target KV of one sequence of max_seq_len tokens; draft_kv: of all sequences."""

    weights: int
    workspace: int
    draft_kv: int
    kv_sequence: int

    @property
    def minimum(self) -> int:
        """The least with which one full-length sequence can run."""
        return self.weights + self.workspace + self.draft_kv + self.kv_sequence

    def sequences_in(self, memory: int) -> int:
        """How many full-length sequences `memory` bytes hold at once."""
        return max(memory - self.weights - self.workspace - self.draft_kv, 0) // self.kv_sequence


def memory_need(config: PairConfig, target: ModelSpec, draft: ModelSpec | None) -> MemoryNeed:
    """What rank 0's GPU holds, which has a share of both models.

    draft: the separate draft model, which keeps a fixed number of tokens for each sequence; or the target once more,
    which keeps none.
    """
    tp, draft_tp = config.tp_size, config.tp_size_of("draft")
    weights = rank_bytes(target, 0, tp, Storage.of(config, "target"))
    if draft is not None:
        weights += rank_bytes(draft, 0, draft_tp, Storage.of(config, "draft"))
    draft_tokens = config.max_batch_size * config.draft_budget
    kv_dtype, draft_dtype = config.resolved_kv_cache_dtype, config.kv_cache_dtype_of("draft")
    draft_kv = 0
    if draft is not None and config.has_draft_cache:
        draft_kv = draft_tokens * rank_kv_bytes_per_token(draft, draft_dtype, draft_tp)
    return MemoryNeed(
        weights=weights,
        workspace=_workspace(config, target),
        draft_kv=draft_kv,
        kv_sequence=_blocks(config.max_seq_len, config) * rank_kv_bytes_per_token(target, kv_dtype, tp),
    )


def _workspace(config: PairConfig, spec: ModelSpec) -> int:
    """Activations of one packed pass of max_num_tokens, and logits, target_probs and draft_probs in float32."""
    width = 8 * spec.hidden_size + 3 * spec.intermediate_size // config.tp_size
    rows = config.max_batch_size * (config.draft.max_draft_len + 1)
    return config.max_num_tokens * width * DTYPE_BYTES[config.dtype] + 3 * rows * spec.vocab_size * 4


def _blocks(tokens: int, config: PairConfig) -> int:
    """Tokens rounded up to whole blocks."""
    return -(-tokens // config.block_size) * config.block_size
