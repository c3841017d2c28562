"""Products become probabilities, and these times the slopes of the options: both of the score that is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..backend import f32, i32, verb
from ..tile.numbers import LOG2_E, numbers
from .fragment_places import Places, my_row
from .options import OptionChain

# (products, options, scale, bases, where) -> two probabilities, and the two times their slopes
PairBends = Callable[..., Any]
# (scores, given, bases) -> the same; given: options, factors, where. factors: scale, and what scores are multiplied by
# to be exponents of 2
PairProbabilities = Callable[..., Any]


def pair_bends(chain: OptionChain, places: Places, j: int, h: int, *, near: bool = False) -> PairBends:
    """Of quad j and row h of a thread: P = exp2(score * log2(e) - base), 0 where a product is -inf, as a mask has it.

    near: of products that `OptionChain.near_score` is for, none of which is masked.
    """
    num, LOG2 = numbers(f32), f32(LOG2_E)
    through, slope = (chain.near_score, chain.near_slope) if near else (chain.score, chain.slope)

    @verb
    def prob_of(product, options, scale, base, at):
        score = through(product * scale, options, at)
        prob = num.exp2(score * LOG2 - base)
        bent = prob * slope(product * scale, options, at) if chain.bends else prob
        if near:
            return prob, bent
        seen = (product != num.minus_inf) & (score != num.minus_inf)
        return prob if seen else num.zero, bent if seen else num.zero

    @verb
    def pair(products, options, scale, bases, where):
        row, first = i32(my_row() + 8 * h), places.first(where)
        distance = places.ahead(where, row, first)
        at, beside = (
            places.at(where, row, first, 8 * j, distance),
            places.at(where, row, first, 8 * j + 1, distance),
        )
        one = prob_of(products[0], options, scale, bases[0], at)
        other = prob_of(products[1], options, scale, bases[1], beside)
        return (one[0], other[0]), (one[1], other[1])

    return pair


def pair_probabilities(chain: OptionChain, bends: PairBends) -> PairProbabilities:
    """Of two products where options have slopes, else of two scores."""
    num = numbers(f32)

    @verb
    def pair(scores, given, bases):
        options, (scale, multiplier), where = given
        if chain.bends:
            return bends(scores, options, scale, bases, where)
        probs = num.exp2(scores[0] * multiplier - bases[0]), num.exp2(scores[1] * multiplier - bases[1])
        return probs, probs

    return pair
