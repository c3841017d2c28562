"""Dropout of probabilities by Philox-4x32-7 (Salmon et al. 2011, doi:10.1145/2063384.2063405), the same in every
kernel.

Seven rounds are the fewest that pass all of BigCrush in the paper. Its recommendation of ten includes three for safety.

Key: the two halves of the 64-bit seed. Counter: the lower half of b * H + h, 4 * (j // 16) + j % 8 // 2, the upper
half, 8 * (i // 16) + i % 8. Keys and queries are counter words that the first round does not multiply. So the first
round is the same for a whole head. In the next two, half of the products are the same for a query, and half for a key.

Query i and key j take word 2 * (j // 8 % 2) + i // 8 % 2 of the four results: its lower half for even j, else its upper
half. So one Philox call serves rows r and r + 8 of sixteen, and two adjacent columns of sixteen with those 8 further.
That is what a thread holds of two neighbouring tensor-core tiles: one word per packed pair (`keeps`).

The probability is dropped if the lower 15 bits of the half are below t = round(2**15 * dropout_p), at most 2**15 - 1.
Otherwise it is divided by the share that stays, 1 - t / 2**15. Fifteen bits compare in order as 16-bit floats without a
sign: a kernel compares two at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Param, Problem, Role
from ..domains import finite
from ..meta import ArrayMeta, Strided
from .option import MOST_BOUND, Option, Parts, Verbs

ROUNDS = 7
DRAWS = 2**15  # number of values that are compared
HALF = 2**16
BOTH = HALF + 1  # times a 16-bit number: both halves of a word hold it


class Facts(NamedTuple):
    on_device: bool  # the seed is on the device
    few_stay: bool  # the bound of what stays is too large for `Verbs.at_least`


class Args(NamedTuple):
    seed: Any
    heads: Any
    bounds: Any  # the smallest number that stays, in both halves of a word
    scale: Any


def probability(value: Any) -> float:
    number = finite(value)
    if not 0 <= number < 1:
        raise ValueError("expected a probability from 0 to below 1")
    return number


def make(v: Verbs, facts: Facts) -> Parts:
    word, low, philox, read = v.word, v.low, _philox(v), v.reader("int64", 0)
    ONE, TWO, THREE, FOUR, SEVEN = map(low, (1, 2, 3, 4, 7))
    DECIDE, FULL, BIT, CARRY, ALL = low((DRAWS - 1) * BOTH), low(DRAWS * BOTH), low(BOTH), low(15), low(HALF - 1)

    @v.verb
    def seed(args):
        return word(read(args.seed)) if facts.on_device else word(args.seed)

    @v.verb
    def by_sum(words, bounds):
        """The highest bit of a half is clear where the probability is dropped."""
        return low(low(low(low(words & DECIDE) + low(FULL - bounds)) >> CARRY & BIT) * ALL)

    stays = v.at_least if v.at_least and not facts.few_stay else by_sum

    @v.verb
    def keeps(args, at, seed, below, right):
        i, j = low(at.i), low(at.j)
        row = low(low(i >> FOUR << THREE | i & SEVEN) + low(8 * below))
        column = low(low(j >> FOUR << TWO | (j & SEVEN) >> ONE) + low(4 * right))
        a, b, c, d = philox(seed, word(at.b * args.heads + at.h), column, row)
        bounds = low(args.bounds)
        return stays(a, bounds), stays(b, bounds), stays(c, bounds), stays(d, bounds)

    @v.verb
    def growth(args):
        return args.scale

    return Parts(seed=seed, keeps=keeps, growth=growth)


def _philox(v: Verbs):
    low, product = v.low, v.product
    MULTIPLY = (low(0xD2511F53), low(0xCD9E8D57))
    WEYL = (low(0x9E3779B9), low(0xBB67AE85))
    UPPER = v.word(32)

    @v.verb
    def philox(seed, head, c1, c3):
        k0, k1 = low(seed), low(seed >> UPPER)
        c0, c2 = low(head), low(head >> UPPER)
        for _ in range(ROUNDS):
            p0, p1 = product(MULTIPLY[0], c0), product(MULTIPLY[1], c2)
            c0, c1, c2, c3 = low(low(p1 >> UPPER) ^ c1 ^ k0), low(p1), low(low(p0 >> UPPER) ^ c3 ^ k1), low(p0)
            k0, k1 = low(k0 + WEYL[0]), low(k1 + WEYL[1])
        return c0, c1, c2, c3

    return philox


def args(problem: Problem) -> Args:
    seed = Strided("seed", ()) if _on_device(problem) else "seed"
    dropped = _dropped(problem)
    return Args(seed, problem.H, dropped * BOTH, DRAWS / (DRAWS - dropped))


def variant(problem: Problem) -> Facts | None:
    return Facts(_on_device(problem), _dropped(problem) > MOST_BOUND) if problem.dropout_p else None


def _dropped(problem: Problem) -> int:
    """Return t, of DRAWS."""
    return min(round(DRAWS * problem.dropout_p), DRAWS - 1)


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
    variant=variant,
    args=args,
    make=make,
    check=check,
)
