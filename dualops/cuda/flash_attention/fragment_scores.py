"""What happens to scores in the registers of tensor cores' products: through the options, masked, weighted. And which
rows and columns of a tile a thread has there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...spec.attention import At
from ..backend import Namespace, cuda, f32, i32, i64, u32, u64, verb
from ..tile.numbers import LOG2_E, numbers
from ..tile.products import opaque_i32
from ..tile.softmax_rows import LANES as LANES
from ..tile.unrolled import one_after_another
from ..views import start
from .options import OptionChain

GROUP = 2  # quads of which a loop is left to the compiler: what options do to one may be long


class FragmentScores(Namespace):
    """The verbs of a tile of scores, of which a thread has quads: rows r and r + 8, of each two neighbours.

    where: the tile's, whose first row is the first of those that the thread's warpgroup (or warp) has.
    """

    multiplier: Callable[..., Any]  # (scale) -> what a score is multiplied by to be an exponent of 2
    sink: Callable[..., Any]  # (options, h, multiplier) -> the sink as a score, and this lane's share of the sum
    finish: Callable[..., None]  # (scores, options, scale, where): products become scores; -inf where a mask is
    # (options, where, all_seen) -> a bit for each score of a thread: whether picks let it through. all_seen: 1 if known
    picks: Callable[..., Any]
    finish_picked: Callable[..., None]  # (scores, options, scale, where, picks): `finish`, after `picks`
    weigh: Callable[..., None]  # (scores, options, where): probabilities, by their weights
    # (scores, options, factors, where): products, -inf where a mask is, become probabilities times the options' slopes.
    # factors: scale, and of my two rows what their exponents of 2 are less by
    bend: Callable[..., None]


@verb
def my_row():
    """The first row of this thread among those of its warpgroup."""
    return i32(cuda.threadIdx.x % 128 // 32 * 16 + cuda.threadIdx.x % 32 // LANES)


@verb
def my_column():
    """The first of the columns of this thread among those of each quad of lanes."""
    return i32(2 * (cuda.threadIdx.x % LANES))


@verb
def store_lse(lse, task, row, value):
    """Of a row of a head's queries, by one of the lanes that share it."""
    i = i32(task.m0 + row)
    if i < task.Sq and cuda.threadIdx.x % LANES == 0:
        lse.data[start(lse, task.b, task.h, task.q_first + i)] = value


def fragment_scores(
    chain: OptionChain, rows: int, columns: int, heads: int = 1, *, apart: bool = True, bent: bool = False
) -> FragmentScores:
    """For tiles [rows, columns] of a warpgroup, or of a warp. Scores are multiplied by `scale` where options change
    them; where none does, that is left to the exponents. heads: each query has so many rows, of heads that follow one
    another; there are no weights then. apart: tiles that have nothing beyond the last query or key are treated apart,
    which takes registers, where options read arrays. bent: `finish` masks products, which `bend` then takes on.
    """
    num, quads, LOG2, changes = numbers(f32), columns // 8, f32(LOG2_E), chain.scores and not bent
    groups = [(first, min(first + GROUP, quads)) for first in range(0, quads, GROUP)]

    @verb
    def multiplier(scale):
        return LOG2 if chain.scores else scale * LOG2

    @verb
    def sink(options, h, multiplier):
        found, share = chain.sink(options, i64(h)) * LOG2 / multiplier, num.zero
        if cuda.threadIdx.x % LANES == 0:
            share = num.exp2((found - num.base(found)) * multiplier)
        return found, share

    @verb
    def ahead(where, row, key):
        """How far the query of a row is ahead of a key."""
        return f32(i32(where.m0 + row // heads + where.offset - key))

    @verb
    def my_key(where):
        """The first of mine in a tile, an even one; of 64 bits, so that a constant beside it is an address's."""
        return i64(opaque_i32(i32(where.n0 + my_column())))

    @verb
    def place_inside(where, row, key, e, distance):
        """The same where nothing is beyond."""
        i = i32(where.m0 + row // heads)
        return At(where.b, i32(where.h + row % heads), i, key + e, i32(i + where.offset), distance - f32(e), e & 1)

    @verb
    def place(where, row, key, e, distance):
        """Where a score stands, of a row and of key `key + e`; what is beyond the last query or key, and is masked,
        stands at that one, or next to it: options read arrays there.
        """
        i, j = min(i32(where.m0 + row // heads), i32(where.Sq - 1)), min(i32(key + e), i32(where.Sk - 1))
        return At(where.b, i32(where.h + row % heads), i, j, i32(i + where.offset), distance - f32(e), j & 1)

    @verb
    def inside(where):
        return (where.m0 + (rows + heads - 1) // heads <= where.Sq) & (where.n0 + columns <= where.Sk)

    @verb
    def within(options, where):
        m1, n1 = min(where.m0 + rows // heads, where.Sq), where.n0 + columns  # rows beyond the last query do not count
        return chain.within(options, where.m0, m1, where.n0, n1, where.offset, where.Sq, where.Sk)

    def changed(place: Callable[..., At], j: int, h: int) -> Callable[..., None]:
        @verb
        def change(scores, options, scale, where):
            row, key = i32(my_row() + 8 * h), my_key(where)
            distance = ahead(where, row, key)
            for e in range(2):
                at = place(where, row, key, 8 * j + e, distance)
                scores[4 * j + 2 * h + e] = chain.score(scores[4 * j + 2 * h + e] * scale, options, at)

        return change

    def hidden(h: int) -> Callable[..., None]:
        @verb
        def hide(scores, options, scale, where):
            i, column = i32(where.m0 + (my_row() + 8 * h) // heads), my_column()
            first, end = chain.keys(options, i, i32(i + where.offset), where.Sk)
            first, end = i32(first - where.n0 - column), i32(end - where.n0 - column)
            for j in range(quads):
                for e in range(2):
                    if (8 * j + e < first) | (8 * j + e >= end):
                        scores[4 * j + 2 * h + e] = num.minus_inf

        return hide

    def picked(j: int, h: int) -> Callable[..., None]:
        @verb
        def pick(scores, options, scale, where):
            row, key = i32(my_row() + 8 * h), my_key(where)
            distance = ahead(where, row, key)
            for e in range(2):
                at = place(where, row, key, 8 * j + e, distance)
                if scores[4 * j + 2 * h + e] != num.minus_inf and not chain.pick(options, at):
                    scores[4 * j + 2 * h + e] = num.minus_inf

        return pick

    def bent_ones(j: int, h: int) -> Callable[..., None]:
        @verb
        def bend_pair(scores, options, factors, where):
            row, key = i32(my_row() + 8 * h), my_key(where)
            distance = ahead(where, row, key)
            for e in range(2):
                product, bent_prob = scores[4 * j + 2 * h + e], num.zero
                if product != num.minus_inf:
                    at = place(where, row, key, 8 * j + e, distance)
                    score = chain.score(product * factors[0], options, at)
                    if score != num.minus_inf:
                        bent_prob = num.exp2(score * LOG2 - factors[1 + h])
                        if chain.bends:
                            bent_prob *= chain.slope(product * factors[0], options, at)
                scores[4 * j + 2 * h + e] = bent_prob

        return bend_pair

    pairs = [(j, h) for j in range(quads) for h in range(2)]
    change, change_inside = (
        one_after_another([changed(make, *pair) for pair in pairs]) for make in (place, place_inside)
    )
    pick, hide = one_after_another([picked(*pair) for pair in pairs]), one_after_another([hidden(h) for h in range(2)])

    bend = one_after_another([bent_ones(*pair) for pair in pairs])

    @verb
    def through(scores, options, scale, where):
        if apart and chain.reads and inside(where):
            change_inside(scores, options, scale, where)
        else:
            change(scores, options, scale, where)

    @verb
    def finish(scores, options, scale, where):
        if changes:
            through(scores, options, scale, where)
        if chain.picks or not within(options, where):
            hide(scores, options, scale, where)
            if chain.picks:
                pick(scores, options, scale, where)

    ALL = u64((1 << 4 * quads) - 1)

    @verb
    def picks(options, where, all_seen):
        """Asked before the scores are there, so that registers are left for whatever a user's function needs."""
        row, key, found, j = my_row(), my_key(where), ALL, i32(0)
        if all_seen == 0:
            found = u64(0)
            while j < quads:
                quad = u32(0)
                for h in range(2):
                    for e in range(2):
                        distance = ahead(where, i32(row + 8 * h), key)
                        if chain.pick(options, place(where, i32(row + 8 * h), key, i32(8 * j + e), distance)):
                            quad |= u32(1 << (2 * h + e))
                found |= u64(u64(quad) << u64(4 * j))
                j = opaque_i32(j + 1)
        return found

    @verb
    def finish_picked(scores, options, scale, where, found):
        if changes:
            through(scores, options, scale, where)
        if not within(options, where):
            hide(scores, options, scale, where)
        if found != ALL:
            for j in range(quads):
                quad = u32(u32(found >> u64(32 * (j // 8))) >> u32(4 * (j % 8)))
                for e in range(4):
                    if (quad & u32(1 << e)) == u32(0):
                        scores[4 * j + e] = num.minus_inf

    def weighed(first: int, end: int) -> Callable[..., None]:
        @verb
        def weigh_some(scores, options, scale, where):
            for j in range(first, end):
                corner = place_inside(where, my_row(), my_key(where), 8 * j, f32(0))
                a, b, c, d = chain.weights(options, corner)
                scores[4 * j] *= a
                scores[4 * j + 1] *= b
                scores[4 * j + 2] *= c
                scores[4 * j + 3] *= d

        return weigh_some

    weigh_all = one_after_another([weighed(*group) for group in groups])

    @verb
    def weigh(scores, options, where):
        if chain.weighs:
            weigh_all(scores, options, f32(1), where)

    return FragmentScores(
        multiplier=multiplier,
        sink=sink,
        finish=finish,
        picks=picks,
        finish_picked=finish_picked,
        weigh=weigh,
        bend=bend,
    )
