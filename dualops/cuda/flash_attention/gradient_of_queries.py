"""Gradients of scores in the registers of tensor cores' products, where rows are queries.

P = exp2(scores - lse) * slope;  dS = P * (weight * dP - delta)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Namespace, cuda, f32, verb
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.softmax_rows import ROWS, SoftmaxRows
from ..tile.unrolled import one_after_another
from ..tile.warpgroup_exchange import EIGHT, Handover
from .fragment_scores import FragmentScores, my_row
from .options import OptionChain
from .saved_lse import base_of


class RowsOfQueries(Namespace):
    """The verbs of a tile's rows of dq."""

    pair: Callable[..., Any]  # () -> an array of two numbers
    read: Callable[..., None]  # (found, x, task, row): of my rows of the warpgroup's from `row` on; 0 beyond the last
    scale: Callable[..., None]  # (acc, scale, lse): dS @ K becomes dq; 0 where a row has seen nothing


class GradientOfQueries(RowsOfQueries):
    """The verbs of tiles of which a thread has two rows, r and r + 8; base, delta and lse are arrays of two numbers."""

    bases: Callable[..., None]  # (base, lse): as `saved_lse` makes it
    probs: Callable[..., None]  # (scores, held, options, scale, where, base): finished scores become P; held: `bend`'s
    d_scores: Callable[..., None]  # (scores, d_probs, options, where, delta): P becomes dS


def rows_of_queries(acc_size: int) -> RowsOfQueries:
    """For so many numbers of dq of a thread."""
    num, quads = numbers(f32), acc_size // 4

    @verb
    def pair():
        return cuda.local.array(ROWS, f32)

    @verb
    def read(found, x, task, row):
        for h in range(ROWS):
            found[h] = num.zero
            i = task.m0 + row + my_row() + 8 * h
            if i < task.Sq:
                found[h] = x.data[start(x, task.b, task.h, task.q_first + i)]

    def scaled(h: int) -> Callable[..., None]:
        @verb
        def scale(acc, factor, lse, _):
            seen = lse[h] != num.minus_inf
            for j in range(quads):
                acc[4 * j + 2 * h] = acc[4 * j + 2 * h] * factor if seen else num.zero
                acc[4 * j + 2 * h + 1] = acc[4 * j + 2 * h + 1] * factor if seen else num.zero

        return scale

    scale_both = one_after_another([scaled(h) for h in range(ROWS)])

    @verb
    def scale(acc, factor, lse):
        scale_both(acc, factor, lse, 0)

    return RowsOfQueries.from_locals(locals())


def gradient_of_queries(
    chain: OptionChain, score: FragmentScores, rows: SoftmaxRows, scores_size: int, acc_size: int
) -> GradientOfQueries:
    """For so many scores and numbers of dq of a thread. Slopes need scores that `finish` leaves as products."""
    quads, own, to_base = scores_size // 4, rows_of_queries(acc_size), base_of(chain)

    @verb
    def bases(base, lse):
        for h in range(ROWS):
            base[h] = to_base(lse[h])

    @verb
    def probs(scores, held, options, scale, where, base):
        if chain.scores:
            score.bend(scores, held, options, (scale, base[0], base[1]), where)
        else:
            factor = rows.pair()
            for h in range(ROWS):
                factor[h] = score.units(scale)[0]
            rows.exp2(scores, base, factor)
        rows.settle(scores)

    def of_row(h: int) -> Callable[..., None]:
        @verb
        def d_scores(scores, d_probs, delta, _):
            for j in range(quads):
                scores[4 * j + 2 * h] *= d_probs[4 * j + 2 * h] - delta[h]
                scores[4 * j + 2 * h + 1] *= d_probs[4 * j + 2 * h + 1] - delta[h]

        return d_scores

    both_rows = one_after_another([of_row(h) for h in range(ROWS)])

    @verb
    def d_scores(scores, d_probs, options, where, delta):
        score.weigh(d_probs, options, where)
        both_rows(scores, d_probs, delta, 0)

    return GradientOfQueries.from_locals(locals(), pair=own.pair, read=own.read, scale=own.scale)


def d_scores_apart(score: FragmentScores, box: Handover, size: int) -> Callable[..., None]:
    """The verb (d_probs, smem, place, options, where, delta): dP becomes dS where another warpgroup has P. So many
    numbers of P * slope are in a place of the box.
    """

    def of_eight(first: int) -> Callable[..., None]:
        @verb
        def some(d_probs, smem, place, delta):
            probs = cuda.local.array(EIGHT, f32)
            box.get(probs, smem, place, first)
            for n in range(EIGHT):
                d_probs[first + n] = probs[n] * (d_probs[first + n] - delta[n // 2 % ROWS])

        return some

    all_eights = one_after_another([of_eight(first) for first in range(0, size, EIGHT)])

    @verb
    def d_scores(d_probs, smem, place, options, where, delta):
        score.weigh(d_probs, options, where)
        all_eights(d_probs, smem, place, delta)

    return d_scores
