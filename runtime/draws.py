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
from collections.abc import Sequence
from enum import IntEnum
from typing import overload

import numpy as np
import torch
from numpy.random import Philox
from numpy.typing import NDArray

# Philox4x64-10: multipliers of words 0 and 2 of the counter, and what a round adds to words 0 and 1 of the key.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)


class Purpose(IntEnum):
    """What a draw is for; draws of two purposes at one position are independent."""

    DRAFT = 1  # a token from draft_probs
    ACCEPT = 2  # accept or reject the draft token
    SAMPLE = 3  # a recovered or bonus token (plain decoding: every token)
    GUMBEL = 4  # the noise that draft and target share in the coupled rule
    CHILD_SEED = 5  # the seed of the i-th output of a request


DrawKey = tuple[int, int, Purpose]  # seed, position, purpose


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One float64 in [0, 1), a multiple of 2**-53."""
    return int(_raw(seed, position, purpose, 1)[0] >> np.uint64(11)) * 2.0**-53


def uniforms(keys: Sequence[DrawKey]) -> list[float]:
    """`uniform` of each key, all at once: numpy's generator takes longer to set up than a draw takes to compute."""
    if not keys:
        return []
    seeds, positions, purposes = zip(*keys, strict=True)
    counter = np.zeros((4, len(keys)), dtype=np.uint64)
    counter[0] = 1  # numpy steps the counter before the first block
    counter[1], counter[2] = positions, np.array(purposes, dtype=np.uint64)
    words = _philox_first_words(counter, np.array(seeds, dtype=np.uint64))
    draws: list[float] = ((words >> np.uint64(11)) * 2.0**-53).tolist()
    return draws


def gumbel(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, float64 [vocab_size], always finite; a larger vocabulary only adds entries at the end."""
    # Odd multiples of 2**-53: neither 0 nor 1 is among them, so both logarithms are finite.
    noise = ((_raw(seed, position, Purpose.GUMBEL, vocab_size) >> np.uint64(12)) + 0.5) * 2.0**-52
    for _ in range(2):  # -log(-log(u)), in place
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return torch.from_numpy(noise)


class GumbelRows(Sequence[torch.Tensor]):
    """`gumbel` of `count` positions from `first` on, each made when it is looked at."""

    def __init__(self, seed: int, first: int, count: int, vocab_size: int) -> None:
        self._seed = seed
        self._positions = range(first, first + count)
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [gumbel(self._seed, position, self._vocab_size) for position in self._positions[index]]
        return gumbel(self._seed, self._positions[index], self._vocab_size)


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


def _philox_first_words(counter: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Word 0 of each block [n]; counter [4, n], first words of the keys [n], whose second word is 0."""
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for i in range(_ROUNDS):
        high, low = _product(even)
        key1 = np.uint64(i * _WEYL[1] % 2**64)
        even = np.stack([high[1] ^ odd[0] ^ (keys + np.uint64(i * _WEYL[0] % 2**64)), high[0] ^ odd[1] ^ key1])
        odd = low[::-1]
    words: NDArray[np.uint64] = even[0]
    return words


def _product(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Upper and lower 64 bits of words [2, n] times the multipliers, by halves of 32 bits."""
    a0, a1, b0, b1 = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF, words & _LOW, words >> _HALF
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF), words * _MULTIPLIERS
