"""Counter-based randomness: each draw is a function of (seed, position, purpose) and of nothing else.

So a draw does not depend on the other requests of a batch, on the order of evaluation, or on a preemption, and
throwing a rejected draft away leaves no trace in the stream. Source: Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3" (Philox4x64-10, here numpy's). Only raw bits are taken from numpy, because those never change between
its versions.

A position is the absolute index in the sequence of the token that is drawn. Rejection throws draft tokens away, and the
next round draws with the same keys again; that is exact as long as nobody has looked: how many tokens to draft may
depend on committed tokens and on time, never on draft tokens (or probabilities after them) that were not committed.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np
import torch
from numpy.random import Philox
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a draw is for; draws of two purposes at one position are independent."""

    DRAFT = 1  # a token from draft_probs
    ACCEPT = 2  # accept or reject the draft token
    SAMPLE = 3  # a recovered or bonus token (plain decoding: every token)
    GUMBEL = 4  # the noise that draft and target share in the coupled rule
    CHILD_SEED = 5  # the seed of the i-th output of a request


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One float64 in [0, 1), a multiple of 2**-53."""
    return int(_raw(seed, position, purpose, 1)[0] >> np.uint64(11)) * 2.0**-53


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float64 [vocab_size], always finite; a larger vocabulary only adds entries at the end."""
    # Odd multiples of 2**-53: neither 0 nor 1 is among them, so both logarithms are finite.
    noise = ((_raw(seed, position, Purpose.GUMBEL, vocab_size) >> np.uint64(12)) + 0.5) * 2.0**-52
    for _ in range(2):  # -log(-log(u)), in place
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return torch.from_numpy(noise)


def fresh_seed() -> int:
    """A seed for a request that gives none, from the operating system; two requests never share a stream."""
    return secrets.randbits(64)


def child_seed(seed: int, index: int) -> int:
    """Seed of output `index` of a request with `n` outputs; output 0 has the request's own seed."""
    return int(_raw(seed, index, Purpose.CHILD_SEED, 1)[0]) if index else seed


def _raw(seed: int, position: int, purpose: Purpose, count: int) -> NDArray[np.uint64]:
    """`count` words of 64 bits. The lowest counter word runs over blocks of a draw; the others name the draw."""
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([0, position, purpose, 0], dtype=np.uint64)
    bits: NDArray[np.uint64] = Philox(key=key, counter=counter).random_raw(count)
    return bits
