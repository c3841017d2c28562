"""The factors of a warp's scores of a tile, applied to accumulators of tensor cores.

    P_rc = scale * (q_r . k_c + terms) * what is left of c at r * weight_c         0 for a pair that is not seen
    sums_r += P_rc, or |P_rc|

A thread has rows m and m + 8 and two neighbouring columns of each eight (`tile.fragment.accumulator`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Members, f32, i32, members, noun, verb
from ...launch.views import start
from ...tile.numbers import numbers
from ...tile.storage import storage
from ...tile.unrolled import one_after_another
from ..arguments import ABS, Variant
from ..decays import step_decays

# log2 of a gamma; below it the rounding errors of neighbouring tokens' scores count (sm90's `constant_decay`)
LEAST_KEPT = f32(math.log2(0.968))
FEW_SEEN = 64  # tokens: normalized results are largest in rows that see no more
NARROW = 16  # columns of q or of v


class Place(NamedTuple):
    """The position of a thread's scores."""

    b: Any
    h: Any
    m: Any  # its upper row
    n: Any  # its first column
    rows: Any  # of the sequence
    columns: Any
    row0: Any  # the token of row 0
    column0: Any  # the token of column 0
    whole: Any  # whether all of the block's rows see all columns of the tile


@noun
def pairs_of(variant: Variant, block_kv: int) -> Members:
    """The verbs for tiles with this number of columns."""
    num, mem, steps = numbers(f32), storage(variant.mask or variant.dtype), step_decays(variant.dtype)
    QUADS, EIGHT = block_kv // 8, f32(8)

    @verb
    def _row_of(place, half, x, mine, call):
        """Return the last column that a row sees, its mark and its term."""
        m = place.m + 8 * half
        last, mark, rest, term = i32(m + call.offset), num.zero, num.zero, num.zero
        if variant.masked:
            last = i32(place.columns - 1)
        if m >= place.rows:
            last = i32(-1)
        if variant.stepwise:
            mark, rest = steps.mark(mine, min(m, place.rows - 1) + call.later)
        if variant.normalized and call.row_term != 0 and m < place.rows:
            term = x.terms.data[start(x.terms, place.b, place.h, place.row0 + call.direction * m)]
        return last, mark, rest, term

    def quad(j: int) -> Callable[..., None]:
        @verb
        def weigh_quad(scores, sums, known, arguments):
            (place, mine, upper, lower), (x, call) = known, arguments
            for e in range(2):
                n = place.n + (8 * j + e)
                here = n < place.columns
                weight, term, mark, rest = num.one, num.zero, num.zero, num.zero
                if variant.stepwise:
                    mark, rest = steps.mark(mine, min(n, place.columns - 1) + call.later)
                if variant.normalized and call.column_weighted != 0 and here:
                    token = place.column0 + call.direction * n
                    weight = x.weights.data[start(x.weights, place.b, place.h, token)]
                    if call.column_term != 0:
                        term = x.terms.data[start(x.terms, place.b, place.h, token)]
                for half in range(2):
                    last, row_mark, row_rest, row_term = lower if half else upper
                    m, seen = place.m + 8 * half, here & (n <= last)
                    if variant.masked:
                        factor = num.zero
                        if seen:
                            row, column = place.row0 + call.direction * m, place.column0 + call.direction * n
                            factor = f32(mem.load(x.mask.data, start(x.mask, place.h, row, column)))
                    elif variant.stepwise:
                        factor = steps.fade(mine, mark, rest, row_mark, row_rest)
                    else:
                        factor = num.exp2(mine * f32(i32(m + call.offset - n)))
                    score = scores[4 * j + 2 * half + e]
                    if variant.normalized:
                        score += row_term + term
                    score *= call.scale * factor
                    score = score if seen else num.zero
                    if variant.normalized:
                        sums[half] += abs(score) if call.normalize == ABS else score
                        score *= weight if seen else num.one
                    scores[4 * j + 2 * half + e] = score

        return weigh_quad

    @verb
    def _weigh_by_head(scores, sums, place, mine, x, call):
        """With gamma alone: from the nearest quad on, because the factor falls by gamma^8 from quad to quad."""
        fade, last = num.exp2(mine * EIGHT), i32(place.columns - 1 - place.n)
        for half in range(2):
            for e in range(2):
                apart = i32(place.m + 8 * half + call.offset - place.n - e)  # from the column of quad 0
                if place.whole:
                    factor = num.exp2(mine * f32(apart - 8 * (QUADS - 1))) * call.scale
                    for j in range(QUADS):
                        at = 4 * (QUADS - 1 - j) + 2 * half + e
                        scores[at] *= factor
                        factor *= fade
                else:
                    nearest = apart & 7 if apart < 8 * QUADS else apart - 8 * (QUADS - 1)
                    factor = num.exp2(mine * f32(nearest)) * call.scale
                    for j in range(QUADS):
                        column = 8 * (QUADS - 1 - j)
                        at = column // 2 + 2 * half + e
                        seen = column <= apart
                        score = scores[at] * factor
                        scores[at] = score if seen & (column + e <= last) else num.zero
                        factor = factor * fade if seen else factor

    weigh_all = one_after_another([quad(j) for j in range(QUADS)])

    @verb
    def _weigh(scores, sums, place, mine, x, call):
        upper, lower = _row_of(place, 0, x, mine, call), _row_of(place, 1, x, mine, call)
        weigh_all(scores, sums, (place, mine, upper, lower), (x, call))

    @verb
    def counts(mine, call, m0, n0):
        """Return whether the error of rounding P counts, for a block's rows from m0 and a tile's columns from n0 on. It
        does if a row sees few tokens, or if a result has few numbers: then errors do not average out.
        """
        near = n0 + block_kv > m0 + call.offset  # rows see themselves
        if variant.masked:
            counted = True
        elif variant.stepwise:
            counted = near
        else:
            counted = near & ((mine < LEAST_KEPT) | (m0 + call.offset < FEW_SEEN))
        return counted | (min(call.D, call.Dv) <= NARROW)

    by_head = not (variant.masked or variant.stepwise or variant.normalized)
    return members(
        locals(),
        # (scores, sums, place, mine, x, call): x: `Inputs`; sums: of both rows, where they are wanted
        weigh=_weigh_by_head if by_head else _weigh,
    )
