"""Philox-4x32-10 in Python integers, as Salmon et al. 2011 have it, and the dropout that dualops makes of it.

Written from the paper and the text of `dualops/spec/attention/dropout.py` alone: what all else must match.
"""

from __future__ import annotations

from functools import cache

import numpy as np

WORD, HALVES = 2**32, 2**16

Words = tuple[int, int, int, int]

# counter, key, result: from Random123's kat_vectors
KNOWN_ANSWERS: tuple[tuple[Words, tuple[int, int], Words], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * x2, WORD)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return x0, x1, x2, x3


@cache
def half(seed: int, head: int, i: int, j: int) -> int:
    """16 bits that decide over query i and key j of a head, counted over all batches. The seed may be negative."""
    counter = (4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, head % WORD, head // WORD)
    whole = philox(counter, (seed % WORD, seed // WORD % WORD))[2 * (i // 8 % 2) + j % 2]
    return whole // HALVES if j // 8 % 2 else whole % HALVES


def weight(seed: int, dropout_p: float, head: int, i: int, j: int) -> float:
    """What multiplies a probability: 0 where it is dropped."""
    dropped = min(round(HALVES * dropout_p), HALVES - 1)
    return 0.0 if half(seed, head, i, j) < dropped else HALVES / (HALVES - dropped)


def weights(seed: int, dropout_p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Of all probabilities [B, H, Sq, Sk]."""
    B, H, Sq, Sk = shape
    rows = [weight(seed, dropout_p, head, i, j) for head in range(B * H) for i in range(Sq) for j in range(Sk)]
    return np.array(rows).reshape(shape)
