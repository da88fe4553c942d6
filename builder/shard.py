"""Which rows and columns of which source tensor make up each tensor of a TensorRT-LLM checkpoint rank.

Names, the fused qkv and the split follow TensorRT-LLM's own convention: q, k and v are split by heads one by one and
then joined, so a rank holds [q_r | k_r | v_r]; k and v heads are duplicated when there are more ranks than heads;
column-parallel weights (qkv, fc, gate, lm_head) split rows, row-parallel ones (dense, proj) split columns.
"""

from dataclasses import dataclass

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of one source tensor, all its columns or [start, stop) of them; source None = zero rows."""

    source: str | None
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of a rank file: its pieces stand one below the other."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def check_tp(spec: ModelSpec, tp_size: int, role: str) -> None:
    """ConfigError unless heads, KV heads and the MLP of this model can be split over `tp_size` ranks."""
    conflict = _tp_conflict(spec, tp_size)
    if conflict is not None:
        sizes = ", ".join(str(size) for size in range(1, spec.num_heads + 1) if _tp_conflict(spec, size) is None)
        mend = "" if role == "target" else " Set draft.tp_size (--draft-tp), which is the target's by default."
        raise ConfigError(
            f"tp_size {tp_size}: the {role}'s {conflict} cannot be split evenly; it allows {sizes}.{mend}"
        )


def plan_offsets(spec: ModelSpec, rank: int, tp_size: int) -> list[OutputTensor]:
    """What calibration adds to a checkpoint with FP8 weights; the sources are names that it gives its own results.

    Offsets are subtracted from what qkv, fc and gate are given, and these layers' biases hold the offsets' products
    instead; TensorRT-LLM's `mlp_bias` wants one of proj as well, which is zero.
    """
    plan = []
    hidden, inner = spec.hidden_size, _split(spec.intermediate_size, rank, tp_size)
    for index in range(spec.num_layers):
        ours, theirs = f"transformer.layers.{index}", f"model.layers.{index}"
        for name, source in (("input", "input"), ("post", "post_attention")):
            offset = f"{theirs}.{source}_layernorm.offset"
            plan.append(_whole(f"{ours}.{name}_layernorm.offset", offset, (hidden,)))
        plan.append(_qkv(spec, ours, theirs, "bias", rank, tp_size))
        for name, source in (("fc", "gate_proj"), ("gate", "up_proj")):
            piece = Piece(f"{theirs}.mlp.{source}.bias", inner)
            plan.append(OutputTensor(f"{ours}.mlp.{name}.bias", (inner[1] - inner[0],), (piece,)))
        plan.append(OutputTensor(f"{ours}.mlp.proj.bias", (hidden,), (Piece(None, (0, hidden)),)))
    return plan


def plan_rank(spec: ModelSpec, rank: int, tp_size: int) -> list[OutputTensor]:
    """The tensors of rank{rank}.safetensors, in file order."""
    hidden = spec.hidden_size
    plan = [_whole("transformer.vocab_embedding.weight", "model.embed_tokens.weight", (spec.vocab_size, hidden))]
    for index in range(spec.num_layers):
        plan += _plan_layer(spec, index, rank, tp_size)
    plan.append(_whole("transformer.ln_f.weight", "model.norm.weight", (hidden,)))
    plan.append(_lm_head(spec, rank, tp_size))
    return plan


def local_kv_heads(spec: ModelSpec, tp_size: int) -> int:
    """KV heads on each rank; heads are duplicated, not split, when there are more ranks than heads."""
    return max(spec.num_kv_heads // tp_size, 1)


def _tp_conflict(spec: ModelSpec, tp_size: int) -> str | None:
    if spec.num_heads % tp_size:
        return f"{spec.num_heads} attention heads"
    if spec.num_kv_heads % tp_size and tp_size % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads"
    if spec.intermediate_size % tp_size:
        return f"intermediate size {spec.intermediate_size}"
    return None


def _plan_layer(spec: ModelSpec, index: int, rank: int, tp_size: int) -> list[OutputTensor]:
    ours, theirs = f"transformer.layers.{index}", f"model.layers.{index}"
    hidden, head = spec.hidden_size, spec.head_size
    inner = _split(spec.intermediate_size, rank, tp_size)
    local_inner = inner[1] - inner[0]
    q_columns = _split(spec.num_heads * head, rank, tp_size)
    plan = [
        _whole(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (hidden,)),
        _qkv(spec, ours, theirs, "weight", rank, tp_size),
    ]
    if spec.has_qkv_bias:
        plan.append(_qkv(spec, ours, theirs, "bias", rank, tp_size))
    if spec.has_qk_norm:
        for name in ("q", "k"):
            source = f"{theirs}.self_attn.{name}_norm.weight"
            plan.append(_whole(f"{ours}.attention.{name}_layernorm.weight", source, (head,)))
    dense = Piece(f"{theirs}.self_attn.o_proj.weight", (0, hidden), q_columns)
    plan.append(OutputTensor(f"{ours}.attention.dense.weight", (hidden, q_columns[1] - q_columns[0]), (dense,)))
    plan.append(_whole(f"{ours}.post_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", (hidden,)))
    # TensorRT-LLM's gated MLP is proj(silu(fc(x)) * gate(x)): its fc is Hugging Face's gate_proj, its gate up_proj.
    for name, source in (("fc", "gate_proj"), ("gate", "up_proj")):
        piece = Piece(f"{theirs}.mlp.{source}.weight", inner)
        plan.append(OutputTensor(f"{ours}.mlp.{name}.weight", (local_inner, hidden), (piece,)))
    proj = Piece(f"{theirs}.mlp.down_proj.weight", (0, hidden), inner)
    plan.append(OutputTensor(f"{ours}.mlp.proj.weight", (hidden, local_inner), (proj,)))
    return plan


def _qkv(spec: ModelSpec, ours: str, theirs: str, kind: str, rank: int, tp_size: int) -> OutputTensor:
    head, kv_heads = spec.head_size, spec.num_kv_heads
    q_rows = _split(spec.num_heads * head, rank, tp_size)
    if tp_size <= kv_heads:
        kv_rows = _split(kv_heads * head, rank, tp_size)
    else:
        first = rank // (tp_size // kv_heads) * head
        kv_rows = (first, first + head)
    pieces = tuple(
        Piece(f"{theirs}.self_attn.{name}_proj.{kind}", rows)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    )
    size = sum(piece.rows[1] - piece.rows[0] for piece in pieces)
    shape = (size, spec.hidden_size) if kind == "weight" else (size,)
    return OutputTensor(f"{ours}.attention.qkv.{kind}", shape, pieces)


def _lm_head(spec: ModelSpec, rank: int, tp_size: int) -> OutputTensor:
    """Rows of the output matrix, padded with zero rows to a multiple of tp_size; of a tied model, the embedding's."""
    source = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    size = -(-spec.vocab_size // tp_size)
    start, stop = (min(edge, spec.vocab_size) for edge in (rank * size, (rank + 1) * size))
    pieces = [Piece(source, (start, stop))] if stop > start else []
    if stop - start < size:
        pieces.append(Piece(None, (0, size - (stop - start))))
    return OutputTensor("lm_head.weight", (size, spec.hidden_size), tuple(pieces))


def _whole(name: str, source: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name, shape, (Piece(source, (0, shape[0])),))


def _split(size: int, rank: int, tp_size: int) -> tuple[int, int]:
    assert size % tp_size == 0, (size, tp_size)
    return size // tp_size * rank, size // tp_size * (rank + 1)
