"""Enumerations, by their real members; `functional` offers them as the real one does."""

import enum


class PositionEmbeddingType(enum.IntEnum):
    learned_absolute = 0
    rope_gptj = 1
    rope_gpt_neox = 2
    long_rope = 3
    alibi = 4
    alibi_with_scale = 5
    relative = 6
    chatglm = 7
    yarn = 8
    mrope = 9
    deferred = 10

    def is_rope(self) -> bool:
        return self in (self.rope_gptj, self.rope_gpt_neox, self.long_rope, self.mrope)

    @staticmethod
    def from_string(s: str) -> "PositionEmbeddingType":
        return PositionEmbeddingType[s]

    def __str__(self) -> str:
        return self.name


class AttentionMaskType(enum.IntEnum):
    padding = 0
    causal = 1


class LayerNormType(enum.IntEnum):
    LayerNorm = 0
    RmsNorm = 1
    GroupNorm = 2


class RotaryScalingType(enum.IntEnum):
    none = 0
    linear = 1
    dynamic = 2
    longrope = 3
    llama3 = 4
