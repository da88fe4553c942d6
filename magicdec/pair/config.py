"""The configuration of a pair: one target, one way to draft for it, limits and number formats, and what goes together.

Every model here is frozen and refuses unknown keys, so a misspelt key is an error and never a silently used default.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from magicdec.pair.budget import num_cyclic_blocks

DraftKind = Literal["model", "self", "ngram"]
DraftLength = Annotated[int, Field(ge=0)] | Literal["auto"]
DrafterChoice = Literal["own", "auto"]
SinkPositions = Literal["in_cache", "absolute"]
DtypeName = Literal["bfloat16", "float16", "float32"]
KvDtypeName = Literal["bfloat16", "float16", "float32", "fp8"]
KvDtypeChoice = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
WeightQuantization = Literal["none", "fp8", "int8", "int4"]
WeightOnly = Literal["int8", "int4"]
BackendName = Literal["torch", "trtllm"]
GpuName = Literal["a100-80gb", "h100-80gb", "h200"]
Role = Literal["target", "draft"]
ROLES: Final[tuple[Role, ...]] = ("target", "draft")


class Frozen(BaseModel):
    """Immutable, strict about types, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DraftConfig(Frozen):
    """How drafts are made. Lengths are in tokens.

    kind: "model" (a separate draft model), "self" (the target over a bounded block table), "ngram" (prompt lookup).
    window_size: recent tokens the draft always sees; num_sink_tokens: first tokens it keeps (rounded up to blocks).
    max_draft_len: the most draft tokens a step may ever propose; num_draft_tokens: how many it proposes by default,
    0 = plain decoding, "auto" = at each step what commits the most tokens a second. drafter: "own" (as `kind` says) or,
    with num_draft_tokens "auto", "auto": at each step the best of the pair's own, self-speculation (PyTorch only) and
    prompt lookup. sink_positions: see `resolved_sink_positions`. kv_cache_dtype: of a separate draft model's cache;
    "auto" is `dtype`, also where the target's cache is fp8. tp_size: ranks of a separate draft model, the first of the
    target's; None = all of them. ngram_min, ngram_max: sizes for prompt lookup.
    """

    kind: DraftKind
    window_size: int = Field(default=512, gt=0)
    num_sink_tokens: int = Field(default=4, gt=0)
    max_draft_len: int = Field(default=8, gt=0)
    num_draft_tokens: DraftLength = 4
    drafter: DrafterChoice = "own"
    sink_positions: SinkPositions | None = None
    kv_cache_dtype: KvDtypeChoice = "auto"
    tp_size: int | None = Field(default=None, gt=0)
    ngram_min: int = Field(default=1, gt=0)
    ngram_max: int = Field(default=3, gt=0)

    @property
    def most_draft_tokens(self) -> int:
        """The most that a step proposes for a request that does not ask for its own number."""
        return self.max_draft_len if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def resolved_sink_positions(self) -> SinkPositions:
        """Where sink keys stand: a draft model's follow its window, in self-speculation they are the target's own."""
        if self.sink_positions is not None:
            return self.sink_positions
        return "absolute" if self.kind == "self" else "in_cache"

    @model_validator(mode="after")
    def _check(self) -> "DraftConfig":
        if self.most_draft_tokens > self.max_draft_len:
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens} is more than max_draft_len {self.max_draft_len}; "
                "lower the one or raise the other"
            )
        if self.drafter == "auto" and self.num_draft_tokens != "auto":
            raise ValueError(
                f"drafter 'auto' cannot go with a fixed num_draft_tokens ({self.num_draft_tokens}): drafters are "
                "compared at their best lengths; use num_draft_tokens 'auto', or drafter 'own'"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min {self.ngram_min} is more than ngram_max {self.ngram_max}; swap them")
        if self.kind == "self" and self.sink_positions == "in_cache":
            raise ValueError(
                "sink_positions 'in_cache' cannot go with kind 'self', whose sink blocks are the target's own; "
                "use 'absolute' or leave the key out"
            )
        return self


class QuantizationConfig(Frozen):
    """How the linear layers of target and draft are stored.

    "fp8": weights and inputs in E4M3; lm_head and embedding stay. "int8", "int4": weights only, of a draft; lm_head and
    embedding are int8 in both. draft: of a separate draft model, None is "none"; in self-speculation the draft is the
    target, or with int8 and int4 a second set of the target's weights.
    """

    target: WeightQuantization = "none"
    draft: WeightQuantization | None = None

    @property
    def weight_only_draft(self) -> WeightOnly | None:
        """The draft's kind of weights where they alone are quantised."""
        return self.draft if self.draft == "int8" or self.draft == "int4" else None

    @field_validator("target")
    @classmethod
    def _exact_target(cls, value: WeightQuantization) -> WeightQuantization:
        if value in ("int8", "int4"):
            raise ValueError(
                "a target in so few bits gives other outputs, and a draft does not; use quantization.draft for it, and "
                "'fp8' or 'none' here"
            )
        return value


class PairConfig(Frozen):
    """One target with one way to draft for it; a file in configs/ is one of these.

    target, draft_model: which checkpoints the numbers are for (Hugging Face id or path; informational).
    backend: what executes the engine. kv_cache_dtype: of the target's cache; "auto" is `dtype`. gpu: the GPU whose
    memory and arithmetic the build is checked against.
    max_num_tokens: token budget of one packed target pass. beyond_trained_len: allow a max_seq_len past the trained
    length, which is useful for timing only, since answers degrade there.
    """

    name: str = Field(min_length=1)
    target: str = Field(min_length=1)
    draft_model: str | None = None
    draft: DraftConfig
    backend: BackendName = "torch"
    dtype: DtypeName = "bfloat16"
    kv_cache_dtype: KvDtypeChoice = "auto"
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    gpu: GpuName | None = None
    block_size: int = Field(default=16, gt=0)
    max_batch_size: int = Field(default=8, gt=0)
    max_seq_len: int = Field(default=8192, gt=0)
    max_num_tokens: int = Field(default=2048, gt=0)
    tp_size: int = Field(default=1, gt=0)
    beyond_trained_len: bool = False

    @property
    def resolved_kv_cache_dtype(self) -> KvDtypeName:
        """The dtype of keys and values in the target's cache."""
        return self.kv_cache_dtype_of("target")

    def kv_cache_dtype_of(self, role: Role) -> KvDtypeName:
        """The dtype of keys and values in the cache of target or draft; without a draft model both are the target's."""
        own = self.draft.kv_cache_dtype if role == "draft" and self.has_draft_cache else self.kv_cache_dtype
        return self.dtype if own == "auto" else own

    @property
    def has_draft_cache(self) -> bool:
        """Whether drafts have a KV cache of their own: those of a separate draft model."""
        return self.draft.kind == "model"

    @property
    def has_draft_weights(self) -> bool:
        """Whether the engine directory holds a draft/: a separate model, or the target's weights in int8 or int4."""
        return self.draft.kind == "model" or (
            self.draft.kind == "self" and self.quantization.weight_only_draft is not None
        )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The folders of the engine directory."""
        return ROLES if self.has_draft_weights else ("target",)

    def quantization_of(self, role: Role) -> WeightQuantization:
        """How the linear layers of target or draft are stored; without weights of its own the draft is the target."""
        if role == "draft" and self.has_draft_weights:
            return self.quantization.draft or "none"
        return self.quantization.target

    def tp_size_of(self, role: Role) -> int:
        """Tensor-parallel ranks of target or draft; without a draft model both are the target."""
        own = self.draft.tp_size if role == "draft" and self.draft.kind == "model" else None
        return self.tp_size if own is None else own

    @property
    def draft_budget(self) -> int:
        """Tokens of KV that a separate draft model holds for each sequence: sink blocks, window, two spare blocks."""
        draft, size = self.draft, self.block_size
        return num_cyclic_blocks(draft.num_sink_tokens, draft.window_size, size, draft.max_draft_len) * size

    @property
    def draft_view_tokens(self) -> int | None:
        """The most tokens that a draft pass looks at, whatever the context; None where no model drafts."""
        if self.draft.kind == "ngram":
            return None
        if self.draft.kind == "model":
            return self.draft_budget
        return self.draft_budget - self.block_size  # the target's table needs no second spare block

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two; use 16 or 32")
        return value

    @model_validator(mode="after")
    def _check(self) -> "PairConfig":
        draft, block = self.draft, self.block_size
        if draft.window_size % block:
            raise ValueError(
                f"draft.window_size {draft.window_size} is not a multiple of block_size {block}; "
                f"use {-(-draft.window_size // block) * block}"
            )
        if draft.max_draft_len > block:
            raise ValueError(
                f"draft.max_draft_len {draft.max_draft_len} is more than block_size {block}: a rewind could reach a "
                f"block already overwritten; use at most {block} or larger blocks"
            )
        need = self.max_batch_size * (draft.most_draft_tokens + 1)
        if self.max_num_tokens < need:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} cannot hold one verification of max_batch_size "
                f"{self.max_batch_size} requests with {draft.most_draft_tokens} draft tokens each; use at least {need}"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> "PairConfig":
        own = self.draft.tp_size
        if own is None:
            return self
        if self.draft.kind != "model":
            raise ValueError(
                f"draft.tp_size {own} with kind {self.draft.kind!r}: there is no draft model of its own; leave it out"
            )
        if own > self.tp_size:
            raise ValueError(
                f"draft.tp_size {own} is more than tp_size {self.tp_size}: the draft runs on some of the target's "
                f"ranks; use at most {self.tp_size}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> "PairConfig":
        own = (("kv_cache_dtype", self.kv_cache_dtype), ("draft.kv_cache_dtype", self.draft.kv_cache_dtype))
        for key, choice in own:
            if choice not in ("auto", "fp8", self.dtype):
                raise ValueError(
                    f"{key} {choice!r} is not dtype {self.dtype!r}: attention reads a cache of its own dtype or of "
                    "fp8; use 'auto' or 'fp8'"
                )
        self._check_draft_precision()
        self._check_weight_only()
        for role in ROLES:
            self._check_fp8(role)
        return self

    def _check_fp8(self, role: Role) -> None:
        weights, cache = self.quantization_of(role) == "fp8", self.kv_cache_dtype_of(role) == "fp8"
        weights_key, cache_key = (
            f"quantization.{role}",
            "kv_cache_dtype" if role == "target" else "draft.kv_cache_dtype",
        )
        if self.gpu == "a100-80gb" and (weights or cache):
            what = f"FP8 weights ({weights_key}: fp8)" if weights else f"An FP8 KV cache ({cache_key}: fp8)"
            raise ValueError(
                f"{what} cannot go with gpu 'a100-80gb', which has no FP8 arithmetic (it came with compute capability "
                "8.9); leave fp8 out, or choose h100-80gb or h200"
            )
        if self.backend == "trtllm" and cache and not weights:
            raise ValueError(
                f"{cache_key} 'fp8' without {weights_key} 'fp8' cannot go with backend 'trtllm': TensorRT-LLM then "
                "turns paged context attention off, and several draft tokens can no longer be verified in one pass; "
                f"add {weights_key}: fp8, or use 'auto'"
            )

    def _check_weight_only(self) -> None:
        """int8 and int4 weights are executed by PyTorch and our own kernels, on one rank."""
        kind, key = self.quantization.weight_only_draft, "quantization.draft"
        if kind is None:
            return
        if self.backend == "trtllm":
            raise ValueError(
                f"{key} {kind!r} cannot go with backend 'trtllm', for which these weights are not written; use 'fp8' "
                "for a separate draft model, or leave it out"
            )
        if self.tp_size_of("draft") > 1:
            mend = "draft.tp_size: 1" if self.draft.kind == "model" else "tp_size 1"
            raise ValueError(
                f"{key} {kind!r} cannot be cut for {self.tp_size_of('draft')} tensor-parallel ranks; use {mend}, or "
                "leave it out"
            )

    def _check_draft_precision(self) -> None:
        """Where the draft is the target itself there is nothing that the draft's switches could change."""
        why = f"with kind {self.draft.kind!r} there is no draft model of its own"
        quantization, cache = self.quantization.draft, self.draft.kv_cache_dtype
        if not self.has_draft_weights and quantization not in (None, self.quantization.target):
            mend = ", or use int8 or int4" if self.draft.kind == "self" else ""
            raise ValueError(
                f"quantization.draft {quantization!r} differs from the target's {self.quantization.target!r}, and "
                f"{why}; leave quantization.draft out{mend}"
            )
        if not self.has_draft_cache and cache not in ("auto", self.resolved_kv_cache_dtype):
            raise ValueError(
                f"draft.kv_cache_dtype {cache!r} differs from the target's {self.resolved_kv_cache_dtype!r}, and "
                f"{why}; leave draft.kv_cache_dtype out"
            )
