"""Dropout of probabilities, by Philox-4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405), whichever kernel runs.

Key: the two halves of the 64-bit seed. Counter: 4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, and the halves of
b * H + h. Of the four words that come of it, query i and key j take number 2 * (i // 8 % 2) + j % 2, and of that the
lower half where j // 8 is even, else the upper. So one call serves rows r and r + 8 of sixteen, and of sixteen columns
two adjacent ones and those 8 further: what a thread holds of two neighbouring tiles of tensor cores (`weights`). The
probability is dropped where these 16 bits are below t = round(2**16 * dropout_p), at most 2**16 - 1, else divided by
the share that stays, 1 - t / 2**16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Param, Problem, Role
from ..domains import finite
from ..meta import ArrayMeta, Strided
from .option import Option, Parts, Verbs

HALVES = 2**16  # values of half a word


class Args(NamedTuple):
    seed: Any
    heads: Any
    threshold: Any  # of a word, whose upper half decides
    scale: Any


def probability(value: Any) -> float:
    number = finite(value)
    if not 0 <= number < 1:
        raise ValueError("expected a probability from 0 to below 1")
    return number


def make(v: Verbs, on_device: bool) -> Parts:
    number, word, where, philox, read = v.number, v.word, v.where, _philox(v), v.reader("int64", 0)
    ZERO, HALF, MASK = number(0), word(16), word(0xFFFFFFFF)

    @v.verb
    def upper(args, words):
        return where(words >= word(args.threshold), args.scale, ZERO)

    @v.verb
    def lower(args, words):
        return upper(args, (words << HALF) & MASK)

    @v.verb
    def weights(args, at):
        seed = word(read(args.seed)) if on_device else word(args.seed)
        row, column = word(at.i >> 4 << 3 | at.i & 7), word(at.j >> 4 << 2 | (at.j & 7) >> 1)
        a, b, c, d = philox(seed, column, row, word(at.b * args.heads + at.h))
        near = lower(args, a), lower(args, b), lower(args, c), lower(args, d)
        return near, (upper(args, a), upper(args, b), upper(args, c), upper(args, d))

    return Parts(weights=weights)


def _philox(v: Verbs):
    word = v.word
    MULTIPLY = (word(0xD2511F53), word(0xCD9E8D57))
    WEYL = (word(0x9E3779B9), word(0xBB67AE85))
    HALF, MASK = word(32), word(0xFFFFFFFF)

    @v.verb
    def philox(seed, c0, c1, c2):
        k0, k1 = seed & MASK, seed >> HALF
        c1, c2, c3 = c1 & MASK, c2 & MASK, c2 >> HALF
        for _ in range(10):
            p0, p1 = MULTIPLY[0] * c0, MULTIPLY[1] * c2
            c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & MASK, (p0 >> HALF) ^ c3 ^ k1, p0 & MASK
            k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
        return c0, c1, c2, c3

    return philox


def args(problem: Problem) -> Args:
    seed = Strided("seed", ()) if _on_device(problem) else "seed"
    dropped = min(round(HALVES * problem.dropout_p), HALVES - 1)
    return Args(seed, problem.H, HALVES * dropped, HALVES / (HALVES - dropped))


def _on_device(problem: Problem) -> bool:
    return problem.arrays["seed"].device != "host"


def check(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> None:
    if params["dropout_p"] and "seed" not in arrays:
        raise ValueError(f"{op}: seed is None, expected an integer where dropout_p is {params['dropout_p']}")


DROPOUT = Option(
    "dropout",
    inputs=(
        Input(
            "seed", (), ("int64",), optional=True, role=Role.OTHER, host=True, doc="of dropout, an integer of 64 bits"
        ),
    ),
    params=(Param("dropout_p", 0.0, probability, "share of the probabilities that become 0, in [0, 1)"),),
    variant=lambda problem: _on_device(problem) if problem.dropout_p else None,
    args=args,
    make=make,
    check=check,
)
