"""Philox-4x32-7 in Python integers, after Salmon et al. 2011, and the dropout that dualops computes from it.

Written from the paper and the text of `dualops/spec/attention/dropout.py` alone: what all else must match.
"""

from functools import cache

import numpy as np

WORD, HALVES, DRAWS = 2**32, 2**16, 2**15

Words = tuple[int, int, int, int]

# counter, key, result: from Random123's kat_vectors
KNOWN_ANSWERS: tuple[tuple[Words, tuple[int, int], Words], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF),
     (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
)  # fmt: skip


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 bits."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(7):
        high0, low0 = divmod(0xD2511F53 * x0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * x2, WORD)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return x0, x1, x2, x3


@cache
def half(seed: int, head: int, i: int, j: int) -> int:
    """15 bits that decide over query i and key j of a head, counted over all batches. The seed may be negative."""
    counter = (head % WORD, 4 * (j // 16) + j % 8 // 2, head // WORD, 8 * (i // 16) + i % 8)
    whole = philox(counter, (seed % WORD, seed // WORD % WORD))[2 * (j // 8 % 2) + i // 8 % 2]
    return (whole // HALVES if j % 2 else whole) % DRAWS


def weight(seed: int, dropout_p: float, head: int, i: int, j: int) -> float:
    """What multiplies a probability: 0 where it is dropped."""
    dropped = min(round(DRAWS * dropout_p), DRAWS - 1)
    return 0.0 if half(seed, head, i, j) < dropped else DRAWS / (DRAWS - dropped)


def weights(seed: int, dropout_p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Of all probabilities [B, H, Sq, Sk]."""
    B, H, Sq, Sk = shape
    rows = [weight(seed, dropout_p, head, i, j) for head in range(B * H) for i in range(Sq) for j in range(Sk)]
    return np.array(rows).reshape(shape)
