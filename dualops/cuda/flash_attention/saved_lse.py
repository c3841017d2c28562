"""P = exp(score - lse), of a score that is made once more and the lse that forward saved.

Where lse is large, a score may differ from forward's by a few ulps of it, that is by more than 1. So a few ulps are
taken from lse, and P is at most 1: scores that differ from the greatest one by so little count as equal to it.

    P = exp2(min(score - lse', 0) * log2(e))           lse': `lowered`

Where no option changes products, P is one fma and one exponential instead:

    P = exp2(product * (scale * log2(e)) - lse * log2(e))

Half an ulp of lse * log2(e) must be small then. For a row of large lse it is a NaN in place of lse, and what that makes
NaN is made once more (`hidden`, `hidden_keys`).
"""

from __future__ import annotations

from ..backend import f32, verb
from ..tile.masked import min_or_nan
from ..tile.numbers import LOG2_E, numbers

NUM, LOG2 = numbers(f32), f32(LOG2_E)
LARGE = f32(2.0**14)  # half an ulp of lse * log2(e) is 2 ** -10 there, a quarter of what P of bfloat16 is rounded by
LOWERED_FROM, SLACK = f32(2.0**20), f32(2.0**-21)


@verb
def is_large(lse):
    return abs(lse) >= LARGE


@verb
def lowered(lse):
    """lse', 0 where a row has seen nothing."""
    lse = NUM.base(lse)
    return lse - abs(lse) * SLACK if abs(lse) > LOWERED_FROM else lse


@verb
def exponent(score, lse):
    """Of 2, by a lowered lse."""
    return min_or_nan(score - lse, NUM.zero) * LOG2


@verb
def of_products(lse):
    """What exponents of 2 of products are less by; 0 where a row has seen nothing, NaN where lse is large."""
    lse = NUM.base(lse)
    return NUM.nan if is_large(lse) else lse * LOG2


@verb
def exponential(score, lse, slack):
    """P of a score that is made by other arithmetic than forward's, which differs from it by `slack` at most."""
    lse = NUM.base(lse)
    return NUM.exp(min_or_nan(score - lse + slack, NUM.zero) if is_large(lse) else score - lse)
