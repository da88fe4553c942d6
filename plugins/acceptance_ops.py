"""Arithmetic of the acceptance kernels in Triton's language: weights as integers, and the counter-based Gumbel noise.

The definitions are those of `acceptance`; products and sums must be rounded one by one (launch with
enable_fp_fusion=False).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from magicdec.plugins import acceptance

NO_EXPONENT = tl.constexpr(acceptance.NO_EXPONENT)
UNREADABLE = tl.constexpr(-acceptance.NO_EXPONENT)  # in place of a block's largest exponent: it holds NaN or infinity
INFINITY = tl.constexpr(math.inf)
_WEIGHT_UNIT = tl.constexpr(2.0**acceptance.WEIGHT_BITS)
_DEGREE = tl.constexpr(len(acceptance.EXP2_COEFFICIENTS) - 1)
_COEFFICIENTS = tl.constexpr(acceptance.EXP2_COEFFICIENTS)

# Philox4x64-10 (Salmon et al. 2011), as numpy counts: the first block of a draw has counter 1.
_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)
_GUMBEL = tl.constexpr(4)  # Purpose.GUMBEL of runtime/sampling/draws.py


@triton.jit
def load(
    table: tl.tensor, row: tl.tensor, stride: tl.tensor, ids: tl.tensor, mask: tl.tensor, other: tl.constexpr
) -> tl.tensor:
    """Entries of a row as float64."""
    values = tl.load(table + row * stride + ids, mask=mask, other=other)
    if values.dtype == tl.float64:
        return values
    return values.to(tl.float32).to(tl.float64)


@triton.jit
def exp2(scaled: tl.tensor, valid: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """2 ** scaled as (mantissa int64, exponent float64)."""
    scaled = tl.where(valid, scaled, 0.0)
    exponents = tl.floor(scaled + 0.5)
    fraction = scaled - exponents
    value = fraction * _COEFFICIENTS[_DEGREE] + _COEFFICIENTS[_DEGREE - 1]
    for i in tl.static_range(2, _DEGREE + 1):
        value = value * fraction + _COEFFICIENTS[_DEGREE - i]
    mantissas = (value * _WEIGHT_UNIT).to(tl.int64)
    return tl.where(valid, mantissas, 0), tl.where(valid, exponents, NO_EXPONENT)


@triton.jit
def distance(tops: tl.tensor, exponents: tl.tensor) -> tl.tensor:
    """Bits to shift a weight by, so that it is relative to `tops`."""
    return tl.minimum(tops - exponents, 63.0).to(tl.int64)


@triton.jit
def weights(logits: tl.tensor, scale: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Integer weights of logits (float64; -inf has none), relative to 2 ** top."""
    mantissas, exponents = exp2(logits * scale, (logits > -INFINITY) & (logits < INFINITY))
    return mantissas >> distance(top, exponents)


@triton.jit
def excess(logits: tl.tensor, scale: tl.tensor, top: tl.tensor, total: tl.tensor, draft_probs: tl.tensor) -> tl.tensor:
    """max(target - draft, 0) in units of the target's weights."""
    drafts = (draft_probs * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(weights(logits, scale, top) - drafts, 0)


@triton.jit
def gumbel(seed: tl.tensor, position: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Noise of one block of the vocabulary, float64 [BLOCK]: `runtime.draws.gumbel`, up to the logarithm's rounding."""
    c0 = block.to(tl.uint64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4).to(tl.uint64) + 1
    zero = c0 * 0
    c1, c2, c3 = zero + position.to(tl.uint64), zero + _GUMBEL, zero
    k0, k1 = zero + seed.to(tl.uint64), zero
    m0, m1 = zero + _MULTIPLIER_0, zero + _MULTIPLIER_1
    for _ in tl.static_range(10):
        high0, low0, high1, low1 = tl.umulhi(m0, c0), m0 * c0, tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    bits = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(uniform))
