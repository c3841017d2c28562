"""Gradients of a bias in the registers of tensor cores' products, where rows are queries.

P = exp2(scores * log2(e) - lse);  total += P * (weight * dP - delta)

A bias comes after all that bends a score, so that its slope is 1. What a mask hides is left out, whatever dP and P are
there: 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from ..backend import Namespace, f32, verb
from ..tile.numbers import LOG2_E, numbers
from ..tile.softmax_rows import ROWS
from ..tile.unrolled import one_after_another
from .fragment_places import my_row


class GradientOfBias(Namespace):
    """The verbs of tiles of which a thread has two rows, r and r + 8; base, lse and delta are arrays of two numbers."""

    clear: Callable[..., None]  # (totals)
    bases: Callable[..., None]  # (base, lse): what exponents of 2 are less by
    # (scores, where, base): finished scores become P, or MASKED where a mask is and beyond the last query
    probabilities: Callable[..., None]
    add: Callable[..., None]  # (totals, probs, d_probs, delta)


MASKED = -1  # instead of P


def gradient_of_bias(size: int) -> GradientOfBias:
    """For so many scores of a thread."""
    num, LOG2, quads, NOT_THERE = numbers(f32), f32(LOG2_E), size // 4, f32(MASKED)

    @verb
    def clear(totals):
        for e in range(size):
            totals[e] = num.zero

    @verb
    def bases(base, lse):
        for h in range(ROWS):
            base[h] = num.base(lse[h]) * LOG2

    def probabilities_of(h: int) -> Callable[..., None]:
        @verb
        def probabilities(scores, where, base, _):
            there = where.m0 + my_row() + 8 * h < where.Sq
            for j in range(quads):
                for e in range(2):
                    score = scores[4 * j + 2 * h + e]
                    prob = num.exp2(score * LOG2 - base[h])
                    scores[4 * j + 2 * h + e] = prob if (score != num.minus_inf) & there else NOT_THERE

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
    def probabilities(scores, where, base):
        both_rows(scores, where, base, 0)

    add = one_after_another([added_of(h) for h in range(ROWS)])
    return GradientOfBias(clear=clear, bases=bases, probabilities=probabilities, add=add)
