"""Turn a tile's scores into probabilities, in registers: exponents to base 2, relative to the row's maximum.

If a score is a curve of its product alone (`Curve`), products are compared instead of scores, and each becomes a
probability at once. No score waits in a register for its row's maximum. A curve has fast forms for products near 0,
which are used if all products of a warp are near 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..compiler.backend import Members, called_verb, f32, i32, i64, members, noun, verb
from ..tile.numbers import LOG2_E, numbers
from ..tile.products import opaque_f32
from ..tile.rows import FULL_WARP, vote_any
from ..tile.softmax_rows import SoftmaxRows, largest_unsigned_word
from ..tile.unrolled import unrolled
from .fragment_scores import FragmentScores
from .options import OptionChain

GROUP = 8  # scores whose loop the compiler unrolls


class RowStatistics(NamedTuple):
    """Local arrays with a number for each of a thread's two rows."""

    row_max: Any
    row_sum: Any
    rescale: Any
    new_max: Any  # of a tile


class FoundLse(NamedTuple):
    """lse of a thread's two rows; of a split, too."""

    lse: Any
    rest: Any  # what rounding took from lse


def are_curves(chain: OptionChain) -> bool:
    """Return whether `exponentials` takes products, -inf where ranges hide one. Other masks and sinks rule it out:
    their -inf is no point of the curve.
    """
    return chain.curve is not None and not chain.picks and not chain.sinks


@noun
def fragment_probabilities(
    chain: OptionChain, softmax: SoftmaxRows, score: FragmentScores, acc_size: int, *, sinks: bool
) -> Members:
    """Verbs of the online softmax on fragments: scores become probabilities. acc_size: numbers of acc per thread. rows:
    `RowStatistics`. sinks: rows have sinks, which `softmax` adds.
    """
    num = numbers(f32)
    factors, exponentials = _of_curves(chain, softmax, score) if are_curves(chain) else _of_scores(softmax, score)

    @verb
    def statistics():
        """Return `RowStatistics`; once in a kernel."""
        return RowStatistics(softmax.pair(), softmax.pair(), softmax.pair(), softmax.pair())

    @verb
    def start(rows):
        """Start before the first tile."""
        softmax.start(rows.row_max, rows.row_sum)

    @verb
    def sink(options, h):
        """Return a head's sink, -inf without sinks."""
        found = num.minus_inf
        if sinks:
            found = chain.sink(options, i64(h))
        return found

    @verb
    def clear(acc):
        """Clear acc of queries that see no tile, of which a sink may make a sum."""
        if sinks:
            for n in range(acc_size):
                acc[n] = num.zero

    @verb
    def divide(acc, rows, sink, factors, options):
        """Divide after the last tile. Return `FoundLse`."""
        softmax.total(rows.row_sum)
        softmax.close(rows.row_max, rows.row_sum, rows.rescale, sink, factors[0])
        if sinks:
            softmax.scale_changed(acc, rows.rescale)
        softmax.divide(acc, rows.row_sum, score.growth(options))
        return FoundLse((rows.row_max[0], rows.row_max[1]), (rows.rescale[0], rows.rescale[1]))

    return members(
        locals(),
        factors=factors,  # (options, scale) -> factors for exponents; the first are the `units` of row maxima
        exponentials=exponentials,  # (scores, rows, factors, options, where)
    )


Exponents = tuple[Callable[..., Any], Callable[..., None]]  # the verbs `factors` and `exponentials`


def _of_scores(softmax: SoftmaxRows, score: FragmentScores) -> Exponents:
    @verb
    def factors(options, scale):
        return (softmax.units(score.units(scale)),)

    @verb
    def exponentials(scores, rows, factors, options, where):
        softmax.new_max(rows.new_max, scores, rows.row_max)
        base, factor = softmax.pair(), softmax.pair()
        softmax.exponents(base, factor, rows.new_max, factors[0])
        softmax.rescale_of(rows.rescale, rows.row_max, rows.new_max, base, factor)
        softmax.exp2(scores, base, factor)
        softmax.add(rows.row_sum, scores, rows.rescale)

    return factors, exponentials


def _of_curves(chain: OptionChain, softmax: SoftmaxRows, score: FragmentScores) -> Exponents:
    num, LOG2, LN2, (rate_of, size_of, curve) = numbers(f32), f32(LOG2_E), f32(1 / LOG2_E), chain.curve
    groups = range(0, score.size, GROUP)

    @verb
    def factors(options, scale):
        return softmax.units((num.one, LN2)), scale * rate_of(options), size_of(options) * LOG2

    @unrolled(groups)
    def measure(least, scores, first):
        for e in range(first, first + GROUP, 2):
            least[e // 2 % 2] = largest_unsigned_word(least[e // 2 % 2], scores[e], scores[e + 1])

    def through(less: Callable[..., Any]) -> Callable[..., None]:
        """Return the verb that turns products into probabilities of scores on the curve. less: the curve's verb
        (product, numbers, row maximum) -> the exponent of 2.
        """

        @unrolled(groups)
        @called_verb
        def make(scores, base, numbers, first):
            for e in range(GROUP):
                scores[first + e] = num.exp2(less(scores[first + e], numbers, base[e // 2 % 2]))

        ANY = less is curve.any

        @verb
        def exponentials(largest, scores, rows, numbers, options, where):
            row_max, new_max = rows.row_max, rows.new_max
            for h in range(2):
                new_max[h] = num.maximum(row_max[h], curve.any(new_max[h], numbers, num.zero))
                rows.rescale[h] = num.exp2(row_max[h] - new_max[h])
                row_max[h] = new_max[h]
            make(scores, row_max, numbers)
            if ANY:  # a hidden score is far from 0
                score.clear(scores, options, where)
            softmax.add(rows.row_sum, scores, rows.rescale)

        return exponentials

    def nearest_of(ways: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> Callable[..., None]:
        """Return the fastest of these ways that is valid for all products of a warp."""
        if not ways:
            return through(curve.any)
        farther, (less, is_for) = nearest_of(ways[:-1]), ways[-1]
        here = through(less)

        @verb
        def exponentials(largest, scores, rows, numbers, options, where):
            if vote_any(i32(not is_for(largest, numbers)), FULL_WARP):
                farther(largest, scores, rows, numbers, options, where)
            else:
                here(largest, scores, rows, numbers, options, where)

        return exponentials

    quickest = nearest_of(curve.nearer)

    @verb
    def exponentials(scores, rows, factors, options, where):
        nothing, least, new_max, largest = softmax.pair(), softmax.pair(), rows.new_max, num.zero
        for h in range(2):
            nothing[h], least[h] = num.minus_inf, num.zero
        softmax.new_max(new_max, scores, nothing)
        measure(least, scores)
        for h in range(2):
            if score.there(where, h):  # rows beyond the last query may be another sequence's
                largest = num.maximum(largest, num.maximum(new_max[h], abs(least[h])))
        numbers = curve.numbers(opaque_f32(factors[1]), opaque_f32(factors[2]))  # each time: registers are few
        quickest(largest, scores, rows, numbers, options, where)

    return factors, exponentials
