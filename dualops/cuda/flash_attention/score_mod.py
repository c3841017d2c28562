"""Options that change scores, in registers: products become scores, and in a gradient probabilities times slopes.

In a gradient P and its slope come from the same score, which is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...spec.attention import At
from ..compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ..tile.numbers import numbers
from ..tile.rows import FULL_WARP, vote_any
from ..tile.unrolled import local_array, one_after_another, unrolled
from .options import OptionChain
from .saved_lse import exponent_of
from .score_coords import Places, is_marked, max_or_nan, my_row


@verb
def _own_word(held, number):
    return held[number]


@noun
def fragment_score_mod(
    chain: OptionChain,
    places: Places,
    groups: list[tuple[int, int]],
    there: Callable[..., Any],
    *,
    apart: bool,
    fetches: bool,
    word: Callable[..., Any] | None = None,
) -> Members:
    """The verbs that apply a chain of options to quads of scores.

    groups: first and end of the quads whose loops the compiler unrolls. there, apart, word: as in `fragment_scores`.
    """
    quads, num, word, DOWN = groups[-1][1], numbers(f32), word or _own_word, 8 if places.steady else 0

    def changed(
        place: Callable[..., At], some: list[tuple[int, int]], score: Callable[..., Any] = chain.score
    ) -> Callable[..., None]:
        @unrolled(some)
        def change(scores, options, scale, where, first, end):
            for j in range(first, end):
                for h in range(2):
                    row, key, down = i32(my_row() + 8 * h), places.first(where), DOWN * h
                    distance = places.ahead(where, i32(row - down), key)
                    for e in range(2):
                        at = place(where, row, key, 8 * j + e, distance, down)
                        scores[4 * j + 2 * h + e] = score(scores[4 * j + 2 * h + e] * scale, options, at)

        return change

    change, change_inside = changed(places.at, groups), changed(places.at_inside, groups)

    # every other group: its arithmetic overlaps special functions of the others
    NEAR, near_groups = chain.near_score is not None, groups[::2]
    near_quads = tuple(j for group in near_groups for j in range(*group))
    scores_of = [chain.near_score if NEAR and group in near_groups else chain.score for group in groups]
    change_near = one_after_another([changed(places.at, [group], score) for group, score in zip(groups, scores_of)])

    @unrolled(near_quads)
    def _greatest(most, scores, h, j):
        for e in range(2):
            most[0] = max_or_nan(most[0], abs(scores[4 * j + 2 * h + e]))

    @verb
    def near(scores, options, scale, where):
        """Return whether `near_score` is exact enough for all products of its quads, in all lanes of a warp. If one is
        NaN, as the mark of a mask is, it is not.
        """
        most = cuda.local.array(1, f32)
        most[0] = num.zero
        if there(where, 0):
            _greatest(most, scores, 0)
        if there(where, 1):
            _greatest(most, scores, 1)
        return not vote_any(i32(not most[0] * scale <= chain.near_bound(options)), FULL_WARP)

    @unrolled(groups)
    def _change_held(scores, held, options, scale, where, first, end):
        for j in range(first, end):
            for h in range(2):
                row, key = i32(my_row() + 8 * h), places.first(where)
                distance = places.ahead(where, row, key)
                for e in range(2):
                    at = places.at(where, row, key, 8 * j + e, distance)
                    score = scores[4 * j + 2 * h + e] * scale
                    scores[4 * j + 2 * h + e] = chain.score_fetched(score, options, at, word(held, 2 * j + h), e)

    def fetched(place: Callable[..., At]) -> Callable[..., None]:
        @unrolled(groups)
        def fetch_some(held, options, where, first, end):
            for j in range(first, end):
                for h in range(2):
                    row, key = i32(my_row() + 8 * h), places.first(where)
                    held[2 * j + h] = chain.fetch(options, place(where, row, key, 8 * j, f32(0)))

        return fetch_some

    fetch_some, fetch_inside = fetched(places.at), fetched(places.at_inside)
    WORDS = 2 * quads if fetches else 1

    @verb
    def fetch(held, options, where):
        """Start to read it."""
        if fetches:
            if places.inside(where):
                fetch_inside(held, options, where)
            else:
                fetch_some(held, options, where)

    @verb
    def through(scores, options, scale, where):
        """Turn products into scores."""
        if NEAR and near(scores, options, scale, where):
            change_near(scores, options, scale, where)
        elif apart and chain.reads and places.inside(where):
            change_inside(scores, options, scale, where)
        else:
            change(scores, options, scale, where)

    @verb
    def through_held(scores, held, options, scale, where):
        """Turn products into scores, with what `fetch` has read."""
        if fetches:
            _change_held(scores, held, options, scale, where)
        else:
            through(scores, options, scale, where)

    return members(
        locals(),
        held=local_array(WORDS, u32),  # () -> for what options read before there are scores
        fetches=fetches,  # whether there is anything to fetch
        near_quads=near_quads,  # of the quads of a thread
    )


# (products, held, options, scale, bases, where) -> two probabilities, and the two times their slopes
PairBends = Callable[..., Any]
PairProbabilities = Callable[..., Any]  # (scores, given, bases) -> the same two pairs. given: `Given`


class Given(NamedTuple):
    """How scores become probabilities."""

    options: Any
    factors: Any  # scale, and what scores are multiplied by to be exponents of 2
    where: Any
    held: Any  # as in `fragment_scores`


def pair_slopes(
    chain: OptionChain, places: Places, *, near: bool, skips: bool, word: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return the verb of all pairs, with the arguments of `PairBends` and the pair's quad and row: P = exp(score -
    lse), 0 if a product is marked. bases: of `saved_lse`.

    near: products are valid for `OptionChain.near_score`, and none is masked. skips: a branch skips hidden products,
        which takes fewer registers in kernels of queries, and more in kernels of keys. word: as in `fragment_scores`.
    """
    num, exponent = numbers(f32), exponent_of(chain)
    through, slope = (chain.near_score, chain.near_slope) if near else (chain.score, chain.slope)

    IN_WORDS, word = word is not None and chain.fetches, word or _own_word

    @verb
    def score_of(score, options, at, bits, e):
        return chain.score_fetched(score, options, at, bits, e) if IN_WORDS else through(score, options, at)

    @verb
    def prob_of_seen(product, options, scale, base, at, bits, e):
        prob = bent = num.zero
        if not is_marked(product):
            score = score_of(product * scale, options, at, bits, e)
            if score != num.minus_inf:  # where it is, the slope may be anything
                prob = bent = num.exp2(exponent(score, base))
                if chain.bends:
                    bent *= slope(product * scale, options, at)
        return prob, bent

    @verb
    def prob_of_any(product, options, scale, base, at, bits, e):
        """Without a branch: it would save only a few instructions."""
        score = score_of(product * scale, options, at, bits, e)
        prob = bent = num.exp2(exponent(score, base))
        if chain.bends:
            bent *= slope(product * scale, options, at)
        hidden = is_marked(product)
        if chain.near_score is None:  # the slope of a score of -inf may be anything
            hidden = hidden | (score == num.minus_inf)
        return num.zero if hidden else prob, num.zero if hidden else bent

    @verb
    def prob_of_near(product, options, scale, base, at, bits, e):
        prob = num.exp2(exponent(through(product * scale, options, at), base))
        return prob, prob * slope(product * scale, options, at)

    far = prob_of_seen if skips and chain.near_score is None else prob_of_any
    prob_of = prob_of_near if near else far

    @verb
    def pair(products, held, options, scale, bases, where, j, h):
        row, first = i32(my_row() + 8 * h), places.first(where)
        distance, bits = places.ahead(where, row, first), u32(0)
        if IN_WORDS:
            bits = word(held, 2 * j + h)
        at = places.at(where, row, first, 8 * j, distance)
        neighbour = places.at(where, row, first, 8 * j + 1, distance)
        one = prob_of(products[0], options, scale, bases[0], at, bits, 0)
        other = prob_of(products[1], options, scale, bases[1], neighbour, bits, 1)
        return (one[0], other[0]), (one[1], other[1])

    return pair


def pair_probabilities(chain: OptionChain, bends: PairBends) -> PairProbabilities:
    """Return the verb for the probabilities and slopes of two products if options have slopes, else of two scores."""
    num, exponent = numbers(f32), exponent_of(chain)

    @verb
    def pair(scores, given, bases):
        scale, multiplier = given.factors
        if chain.bends:
            return bends(scores, given.held, given.options, scale, bases, given.where)
        if chain.scores:
            probs = num.exp2(exponent(scores[0], bases[0])), num.exp2(exponent(scores[1], bases[1]))
        else:
            probs = num.exp2(scores[0] * multiplier - bases[0]), num.exp2(scores[1] * multiplier - bases[1])
        return probs, probs

    return pair
