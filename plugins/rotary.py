"""Rotary position embeddings at explicit positions (RoFormer, arXiv 2104.09864; the half-split form of GPT-NeoX)."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from magicdec.errors import EngineError


class Rotary:
    """Angles of each position, with the `linear` and `llama3` frequency scalings of Hugging Face configurations."""

    def __init__(self, head_size: int, base: float, scaling: Mapping[str, Any] | None, dtype: torch.dtype) -> None:
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(dtype) / head_size
        self.inverse_frequencies = _scale(1.0 / base**exponents, scaling)  # [head_size / 2]

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, 1, head_size] for positions [T]."""
        half = positions.to(self.inverse_frequencies.dtype)[:, None] * self.inverse_frequencies
        both = torch.cat([half, half], dim=-1)[:, None, :]
        return both.cos(), both.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [T, heads, head_size] by angles [T, 1, head_size]; negate `sin` to rotate back."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def _scale(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _scale_llama3(frequencies, scaling)
    raise EngineError(f"rotary scaling {kind!r} is not supported; supported are linear and llama3")


def _scale_llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, those between interpolated."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    smooth = ((trained / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
