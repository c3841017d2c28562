"""How o and lse of a row, found by splits of its keys, become one, split after split. Milakov & Gimelshein 2018
(arXiv:1805.02867), Alg. 3, of whole splits.

most' = max(most, lse_s)
share = exp(most - most'),  weight = exp(lse_s - most' + rest_s)        rest_s: what rounding took from lse_s
total' = total * share + weight,  acc' = acc * share + weight * o_s

At last o = acc / total and lse = most + ln(total). A sink is what there is before the first. A block that has all parts
of a row, `split_kv_serial`, and one that gets them from others, `split_kv_merge`, round alike: they have the same bits.
"""

from __future__ import annotations

from ...compiler.backend import f32, verb
from ...tile.numbers import fma_rn, numbers

NUM = numbers(f32)
ZERO, ONE = NUM.zero, NUM.one


@verb
def total_of(sink):
    """Before the first split, where most is the sink, -inf if there is none."""
    return NUM.exp(sink - NUM.base(sink))


@verb
def shares_of(before, most, lse, rest):
    """share and weight; most: the maximum with this split, before: without it."""
    base = NUM.base(most)
    return NUM.exp(before - base), NUM.exp(lse - base + rest)


@verb
def join(acc, share, weight, o):
    """What acc becomes; and total, of whose splits o is 1."""
    return fma_rn(weight, o, acc * share)


@verb
def inverse_of(total):
    """What acc is multiplied by at last; nothing of a row that sees no key."""
    return ONE / total if total != ZERO else ZERO


@verb
def lse_of(most, total):
    return NUM.base(most) + NUM.log(total)
