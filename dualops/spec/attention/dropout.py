"""Dropout of probabilities, by Philox-4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405), whichever kernel runs.

Key: the two halves of the 64-bit seed. Counter: 4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, and the halves of
b * H + h. Of the four words that come of it, query i and key j take number 2 * (i // 8 % 2) + j % 2, and of that the
lower half where j // 8 is even, else the upper. So one call serves rows r and r + 8 of sixteen, and of sixteen columns
two adjacent ones and those 8 further: what a thread holds of two neighbouring tiles of tensor cores (`keeps`). The
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
    word, low, where, philox, read = v.word, v.low, v.where, _philox(v), v.reader("int64", 0)
    NOTHING, HALF = word(0), low(16)

    @v.verb
    def upper(args, words, bit):
        return where(words >= low(args.threshold), bit, NOTHING)

    @v.verb
    def lower(args, words, bit):
        return upper(args, low(words << HALF), bit)

    @v.verb
    def keeps(args, at):
        seed = word(read(args.seed)) if on_device else word(args.seed)
        row, column = word(at.i >> 4 << 3 | at.i & 7), word(at.j >> 4 << 2 | (at.j & 7) >> 1)
        a, b, c, d = philox(seed, column, row, word(at.b * args.heads + at.h))
        near = lower(args, a, word(1)) | lower(args, b, word(2)) | lower(args, c, word(4)) | lower(args, d, word(8))
        far = upper(args, a, word(16)) | upper(args, b, word(32)) | upper(args, c, word(64)) | upper(args, d, word(128))
        return near | far

    @v.verb
    def growth(args):
        return args.scale

    return Parts(keeps=keeps, growth=growth)


def _philox(v: Verbs):
    low, product = v.low, v.product
    MULTIPLY = (low(0xD2511F53), low(0xCD9E8D57))
    WEYL = (low(0x9E3779B9), low(0xBB67AE85))
    HALF = v.word(32)

    @v.verb
    def philox(seed, c0, c1, c2):
        k0, k1 = low(seed), low(seed >> HALF)
        c0, c1, c2, c3 = low(c0), low(c1), low(c2), low(c2 >> HALF)
        for _ in range(10):
            p0, p1 = product(MULTIPLY[0], c0), product(MULTIPLY[1], c2)
            c0, c1, c2, c3 = low(low(p1 >> HALF) ^ c1 ^ k0), low(p1), low(low(p0 >> HALF) ^ c3 ^ k1), low(p0)
            k0, k1 = low(k0 + WEYL[0]), low(k1 + WEYL[1])
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
