"""Products become probabilities, and these times the slopes of the options: both of the score that is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import f32, i32, u32, verb
from ..tile.numbers import numbers
from .masked import is_marked
from .options import OptionChain
from .saved_lse import exponent_of
from .score_coords import Places, my_row

# (products, held, options, scale, bases, where) -> two probabilities, and the two times their slopes
PairBends = Callable[..., Any]
# (scores, given, bases) -> the same; given: options, factors, where, held. factors: scale, and what scores are
# multiplied by to be exponents of 2
PairProbabilities = Callable[..., Any]


def pair_slopes(
    chain: OptionChain,
    places: Places,
    j: int,
    h: int,
    *,
    near: bool,
    skips: bool,
    word: Callable[..., Any] | None,
) -> PairBends:
    """Of quad j and row h of a thread: P = exp(score - lse), 0 where a product is marked. bases: of `saved_lse`.

    near: of products that `OptionChain.near_score` is for, none of which is masked. skips: what is hidden is skipped by
    a branch, for which kernels of queries take fewer registers, and those of keys more. word: as `fragment_scores` has
    it.
    """
    num, exponent = numbers(f32), exponent_of(chain)
    through, slope = (chain.near_score, chain.near_slope) if near else (chain.score, chain.slope)

    @verb
    def no_word(held, number):
        return u32(0)

    @verb
    def score_read(score, options, at, bits, e):
        return through(score, options, at)

    word_of, score_of = no_word, score_read
    if word is not None and chain.fetches:
        word_of, score_of = word, chain.score_fetched

    @verb
    def prob_of_seen(product, options, scale, base, at, bits, e):
        prob = bent = num.zero
        if not is_marked(product):
            score = score_of(product * scale, options, at, bits, e)
            if score != num.minus_inf:  # there a slope may be anything
                prob = bent = num.exp2(exponent(score, base))
                if chain.bends:
                    bent *= slope(product * scale, options, at)
        return prob, bent

    @verb
    def prob_of_any(product, options, scale, base, at, bits, e):
        """Without a branch: what is done in vain are a few instructions."""
        score = score_of(product * scale, options, at, bits, e)
        prob = bent = num.exp2(exponent(score, base))
        if chain.bends:
            bent *= slope(product * scale, options, at)
        hidden = is_marked(product)
        if chain.near_score is None:  # there a slope may be anything
            hidden = hidden | (score == num.minus_inf)
        return num.zero if hidden else prob, num.zero if hidden else bent

    @verb
    def prob_of_near(product, options, scale, base, at, bits, e):
        prob = num.exp2(exponent(through(product * scale, options, at), base))
        return prob, prob * slope(product * scale, options, at)

    far = prob_of_seen if skips and chain.near_score is None else prob_of_any
    prob_of = prob_of_near if near else far

    @verb
    def pair(products, held, options, scale, bases, where):
        row, first = i32(my_row() + 8 * h), places.first(where)
        distance, bits = places.ahead(where, row, first), word_of(held, 2 * j + h)
        at, beside = (
            places.at(where, row, first, 8 * j, distance),
            places.at(where, row, first, 8 * j + 1, distance),
        )
        one = prob_of(products[0], options, scale, bases[0], at, bits, 0)
        other = prob_of(products[1], options, scale, bases[1], beside, bits, 1)
        return (one[0], other[0]), (one[1], other[1])

    return pair


def pair_probabilities(chain: OptionChain, bends: PairBends) -> PairProbabilities:
    """Of two products where options have slopes, else of two scores."""
    num, exponent = numbers(f32), exponent_of(chain)

    @verb
    def pair(scores, given, bases):
        options, (scale, multiplier), where, held = given
        if chain.bends:
            return bends(scores, held, options, scale, bases, where)
        if chain.scores:
            probs = num.exp2(exponent(scores[0], bases[0])), num.exp2(exponent(scores[1], bases[1]))
        else:
            probs = num.exp2(scores[0] * multiplier - bases[0]), num.exp2(scores[1] * multiplier - bases[1])
        return probs, probs

    return pair
