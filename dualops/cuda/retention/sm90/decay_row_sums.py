"""What passes over each step of a chunk, from the rows of its pairs: verbs of `decay_grad_pairs`.

A thread has two rows of P [64, tokens], and two neighbouring columns of each eight. The sum of a row before a column
has three parts: the eights before, the lanes before in this eight, and the column's neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...compiler.backend import Members, cuda, f32, i32, noun, u32, verb
from ...tile.numbers import numbers
from ...tile.products import anew_i32
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.unrolled import one_after_another
from .decay_tables import EIGHT
from .fragments import column_of, row_of

OF_WARP = 16  # rows


@cache
@noun
def decay_row_sums(tokens: int) -> Members:
    """The verbs for chunks of this many tokens."""
    num = numbers(f32)

    def of_eight(eight: int) -> Callable[..., None]:
        FIRST = EIGHT * eight

        @verb
        def add_eight(sums, products, so_far, places):
            (scores, slopes), (line, column, last, count) = products, places
            here = i32(FIRST + column)
            sums[2 * eight], sums[2 * eight + 1] = num.zero, num.zero
            if last >= FIRST:  # the same for the whole warp
                for half in range(2):
                    at, r = 4 * eight + 2 * half, i32(line + 8 * half)
                    one, other = scores[at] * slopes[at], scores[at + 1] * slopes[at + 1]
                    one, other = one if here < r else num.zero, other if here + 1 < r else num.zero
                    share = one + other
                    beside = num.shuffle(share, 1, FULL_WARP)
                    pair = share + beside
                    pair_beside = num.shuffle(pair, 2, FULL_WARP)
                    before = beside if column & 2 != 0 else num.zero
                    before += pair_beside if column & 4 != 0 else num.zero
                    before += so_far[half]
                    there = r < count
                    sums[2 * eight] += before if there and here <= r else num.zero
                    sums[2 * eight + 1] += before + one if there and here + 1 <= r else num.zero
                    so_far[half] += pair + pair_beside

        return add_eight

    add_all = one_after_another([of_eight(eight) for eight in range(tokens // EIGHT)])

    @verb
    def add(sums, scores, slopes, before, row, count):
        """For each column t of a thread, add over its two rows i >= t: before[i], and P_ij = scores * slopes for all j
        < t. row: the warpgroup's first. count: tokens of the chunk.
        """
        tid = anew_i32(i32(cuda.threadIdx.x))
        last = i32(row + OF_WARP * i32(u32(tid) % u32(128) // u32(32)) + OF_WARP - 1)
        add_all(sums, (scores, slopes), before, (i32(row + row_of(tid)), column_of(tid), last, count))

    @verb
    def up_to(x):
        """Return the sum of this lane's number and those of the lanes before it."""
        lane = i32(u32(anew_i32(i32(cuda.threadIdx.x))) % u32(32))
        for step in range(5):
            there = i32(lane - (1 << step))
            other = shfl_idx_f32(x, i32(there & 31), FULL_WARP)
            x += other if there >= 0 else num.zero
        return x

    return locals()
