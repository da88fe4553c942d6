"""Counter-based randomness: each draw is a function of (seed, position, purpose) and of nothing else.

So a draw does not depend on the other requests of a batch, on the order of evaluation, or on a preemption, and
throwing a rejected draft away leaves no trace in the stream. Source: Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3" (Philox4x64-10, here numpy's). Only raw bits are taken from numpy, because those never change between
its versions. The native library makes the same bits for many draws at once; numpy does where there is none.

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

from magicdec.plugins.cpu.library import native

Words = NDArray[np.uint64]

# Philox4x64-10: multipliers of words 0 and 2 of the counter, and what a round adds to words 0 and 1 of the key.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_NOISE_AT_ONCE = 2**15  # numbers that stay in the caches from one operation to the next


class Purpose(IntEnum):
    """What a draw is for; draws of two purposes at one position are independent."""

    DRAFT = 1  # a token from draft_probs
    ACCEPT = 2  # accept or reject the draft token
    SAMPLE = 3  # a recovered or bonus token (plain decoding: every token)
    GUMBEL = 4  # the noise that draft and target share in the coupled rule
    CHILD_SEED = 5  # the seed of the i-th output of a request


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """One float64 in [0, 1), a multiple of 2**-53."""
    return int(_words_of_one(seed, position, purpose, 1)[0] >> np.uint64(11)) * 2.0**-53


def uniforms(seeds: Words, positions: Words, purpose: Purpose) -> NDArray[np.float64]:
    """`uniform` of each pair [n], all at once."""
    draws: NDArray[np.float64] = (_words(seeds, positions, purpose, 1)[:, 0] >> np.uint64(11)) * 2.0**-53
    return draws


def gumbels(seeds: Words, positions: Words, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of each pair, float64 [n, vocab_size], always finite; more vocabulary only adds entries."""
    noise = np.empty((len(seeds), vocab_size))
    step = max(1, _NOISE_AT_ONCE // vocab_size)
    for start in range(0, len(seeds), step):
        rows = slice(start, start + step)
        _to_noise(_words(seeds[rows], positions[rows], Purpose.GUMBEL, vocab_size), noise[rows])
    return torch.from_numpy(noise)


def fresh_seed() -> int:
    """A seed for a request that gives none, from the operating system; two requests never share a stream."""
    return secrets.randbits(64)


def child_seed(seed: int, index: int) -> int:
    """Seed of output `index` of a request with `n` outputs; output 0 has the request's own seed."""
    return int(_words_of_one(seed, index, Purpose.CHILD_SEED, 1)[0]) if index else seed


def _to_noise(words: Words, out: NDArray[np.float64]) -> None:
    """-log(-log(u)), where u is an odd multiple of 2**-53: neither 0 nor 1, so that both logarithms are finite."""
    np.add(words >> np.uint64(12), 0.5, out=out)
    out *= 2.0**-52
    for _ in range(2):
        np.log(out, out=out)
        np.negative(out, out=out)


def _words_of_one(seed: int, position: int, purpose: Purpose, count: int) -> Words:
    """`count` words of 64 bits. The lowest counter word runs over blocks of a draw; the others name the draw."""
    key = np.array([seed, 0], dtype=np.uint64)
    counter = np.array([0, position, purpose, 0], dtype=np.uint64)
    bits: Words = Philox(key=key, counter=counter).random_raw(count)
    return bits


def _words(seeds: Words, positions: Words, purpose: Purpose, count: int) -> Words:
    """The same of each pair, [n, count]: numpy's generator takes longer to set up than a short draw to compute."""
    library = native()
    if library is not None:
        words = np.empty((len(seeds), count), dtype=np.uint64)
        pointers = seeds.ctypes.data, positions.ctypes.data
        library.magicdec_draws(*pointers, int(purpose), len(seeds), count, words.ctypes.data)
        return words
    if count == 1:
        return _first_words(seeds, positions, purpose)[:, None]
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    return np.stack([_words_of_one(*pair, purpose, count) for pair in pairs])


def _first_words(seeds: Words, positions: Words, purpose: Purpose) -> Words:
    """Word 0 of block 1 [n], by numpy's operations on whole arrays."""
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = 1, positions, purpose  # numpy steps the counter before the first block
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for i in range(_ROUNDS):
        high, low = _product(even)
        key0, key1 = seeds + np.uint64(i * _WEYL[0] % 2**64), np.uint64(i * _WEYL[1] % 2**64)
        even = np.stack([high[1] ^ odd[0] ^ key0, high[0] ^ odd[1] ^ key1])
        odd = low[::-1]
    words: Words = even[0]
    return words


def _product(words: Words) -> tuple[Words, Words]:
    """Upper and lower 64 bits of words [2, n] times the multipliers, by halves of 32 bits."""
    a0, a1, b0, b1 = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF, words & _LOW, words >> _HALF
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF), words * _MULTIPLIERS
