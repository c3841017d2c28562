"""Gradients of a bias in the registers of tensor cores' products, where rows are queries.

P = exp(scores - lse);  total += P * (weight * dP - delta)

A bias comes after all that bends a score, so that its slope is 1. What a mask hides is left out, whatever dP and P are
there: 0 * NaN is NaN. So is a score of -inf, but not in a row that is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, f32, i32, noun, verb
from ..tile.numbers import LOG2_E, numbers
from ..tile.rows import FULL_WARP, vote_any
from ..tile.softmax_rows import ROWS
from ..tile.unrolled import one_after_another
from .masked import is_marked
from .saved_lse import exponent_less, is_large, lowered
from .score_coords import my_row

MASKED = -1  # instead of P
GREATEST = 3.4028234663852886e38  # finite float32


@noun
def gradient_of_bias(size: int) -> Members:
    """The verbs of tiles of which a thread has two rows, r and r + 8; base, lse and delta are arrays of two numbers.

    Finished scores are marked where a mask hides them (`flash_attention.masked`).

    The verbs for so many scores of a thread.
    """
    num, LOG2, quads, NOT_THERE, MOST = numbers(f32), f32(LOG2_E), size // 4, f32(MASKED), f32(GREATEST)

    @verb
    def clear(totals):
        for e in range(size):
            totals[e] = num.zero

    @verb
    def bases(base, lse):
        """Fill base with lse, lowered (`saved_lse`)."""
        for h in range(ROWS):
            base[h] = lowered(lse[h])

    @verb
    def all_count(scores, where, base):
        """Return whether all of a warp's finished scores count: none is masked or beyond the last query, no lse is
        large. Asked of sums of products of two, which are infinite, or NaN, where a score is.
        """
        upper, lower = num.zero, num.zero
        for j in range(quads):
            upper += scores[4 * j] * scores[4 * j + 1]
            lower += scores[4 * j + 2] * scores[4 * j + 3]
        finite = (abs(upper) <= MOST) & (abs(lower) <= MOST)
        there = where.m0 + my_row() + 8 < where.Sq
        usual = not is_large(base[0]) and not is_large(base[1])
        return not vote_any(i32(not (finite & there & usual)), FULL_WARP)

    @verb
    def _exponentials(scores, base):
        upper, lower = base[0] * LOG2, base[1] * LOG2
        for j in range(quads):
            for e in range(4):
                scores[4 * j + e] = num.exp2(scores[4 * j + e] * LOG2 - (upper if e < 2 else lower))

    @verb
    def _add_all(totals, probs, d_probs, delta):
        for j in range(quads):
            for e in range(4):
                totals[4 * j + e] += probs[4 * j + e] * (d_probs[4 * j + e] - delta[e // 2])

    def probabilities_of(h: int) -> Callable[..., None]:
        @verb
        def probabilities(scores, where, base, _):
            there = where.m0 + my_row() + 8 * h < where.Sq
            for j in range(quads):
                for e in range(2):
                    score = scores[4 * j + 2 * h + e]
                    prob = num.exp2(exponent_less(score, base[h]))
                    # all that a NaN row sees is NaN
                    counts = (score != num.minus_inf) | (prob != num.zero)
                    scores[4 * j + 2 * h + e] = prob if counts & (not is_marked(score)) & there else NOT_THERE

        return probabilities

    def added_of(h: int) -> Callable[..., None]:
        @verb
        def add(totals, probs, d_probs, delta):
            for j in range(quads):
                for e in range(2):
                    i = 4 * j + 2 * h + e
                    total = totals[i] + probs[i] * (d_probs[i] - delta[h])
                    totals[i] = totals[i] if probs[i] < num.zero else total

        return add

    both_rows = one_after_another([probabilities_of(h) for h in range(ROWS)])

    @verb
    def probabilities(scores, where, base, all_count):
        """Turn finished scores into P, or MASKED where they do not count."""
        if all_count:
            _exponentials(scores, base)
        else:
            both_rows(scores, where, base, 0)

    add_counted = one_after_another([added_of(h) for h in range(ROWS)])

    @verb
    def add(totals, probs, d_probs, delta, all_count):
        if all_count:
            _add_all(totals, probs, d_probs, delta)
        else:
            add_counted(totals, probs, d_probs, delta)

    return locals()
