"""Sums along the rows and columns of a chunk's pairs, in an order that does not depend on the warps' timing.

    sums = column_sums(at, columns, warps)          every thread's accumulators have `columns` columns
    mine = sums.values()                            for each of a thread's columns, the sum of its own rows
    sums.put(smem, turn, mine)                      my warp's sums, to shared memory
    ... barrier of all warps ...
    total = sums.total(smem, turn, column)          of all warps

`fragment.accumulator` says which element of the accumulators a thread has: eight lanes have the same columns, two
neighbours of each eight. The lanes add up by halves: each sends the sums that another lane keeps, 28 shuffles for 32
columns. Turns alternate between two buffers. One is read while the next one is written, so one barrier a turn suffices.

`decay_row_sums` has what passes over each step of a chunk. A thread has two rows of P [64, tokens], and two
neighbouring columns of each eight. The sum of a row before a column has three parts: the eights before, the lanes
before in this eight, and the column's neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ...tile.numbers import numbers
from ...tile.products import anew_i32
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.unrolled import one_after_another
from .decay_tables import EIGHT, load_float, st_shared_v2_f32, store_float
from .states import column_of, row_of


@cache
@noun
def column_sums(at: int, columns: int, warps: int) -> Members:
    """The verbs for a multiple of 32 columns; shared memory begins at byte `at`. A thread's columns are numbered in
    order, two of each eight.
    """
    num, size, line = numbers(f32), columns // 4, 4 * columns

    def halve(distance: int, first: int, count: int) -> Callable[..., None]:
        """For pairs of values that are `count` apart, lanes keep one and add the other lane's share to it."""
        few = min(count - first, EIGHT)

        @verb
        def keep_half(values, lane, _, __):
            upper = lane & distance != 0
            for n in range(few):
                low, high = values[first + n], values[first + n + count]
                mine, other = (high, low) if upper else (low, high)
                values[first + n] = mine + num.shuffle(other, distance, FULL_WARP)

        return keep_half

    halves = [(16, size // 2), (8, size // 4), (4, size // 8)]
    halve_all = one_after_another(
        [halve(distance, first, count) for distance, count in halves for first in range(0, count, EIGHT)]
    )

    @verb
    def values():
        """Return a local array for the columns of a thread."""
        return cuda.local.array(size, f32)

    @verb
    def put(smem, turn, values):
        """Write the values to shared memory, by all lanes of a warp. The values change."""
        tid = anew_i32(i32(cuda.threadIdx.x))
        lane, warp = i32(u32(tid) % u32(32)), i32(u32(tid) // u32(32))
        halve_all(values, lane, 0, 0)
        first = i32(at + (turn * warps + warp) * line + lane // 4 * (line // 8) + lane % 4 * 8)
        for n in range(size // 16):
            st_shared_v2_f32(smem, i32(first + n * 4 * EIGHT), values[2 * n], values[2 * n + 1])

    @verb
    def total(smem, turn, column):
        """Return the total of a column. All warps must have put theirs before a barrier."""
        first = i32(at + turn * warps * line + 4 * column)
        sum_so_far = load_float(smem, first)
        for warp in range(1, warps):
            sum_so_far += load_float(smem, i32(first + warp * line))
        return sum_so_far

    return members(
        locals(),
        size=size,  # columns of a thread
    )


@cache
@noun
def warp_sums(at: int, warps: int) -> Members:
    """The verbs for one number of each warp, in alternating turns; shared memory begins at byte `at`."""
    num = numbers(f32)

    @verb
    def put(smem, turn, x):
        """Write the number of my warp, by all its lanes, which have the same number."""
        tid = u32(anew_i32(i32(cuda.threadIdx.x)))
        if tid % u32(32) == u32(0):
            store_float(smem, i32(at + 4 * (turn * warps + i32(tid // u32(32)))), x)

    @verb
    def total(smem, turn):
        """Return the total of all warps, after a barrier."""
        return before(smem, turn, warps)

    @verb
    def before(smem, turn, end):
        """Return the total of the warps before this one."""
        sum_so_far = num.zero
        for warp in range(warps):
            number = load_float(smem, i32(at + 4 * (turn * warps + warp)))
            sum_so_far += number if warp < end else num.zero
        return sum_so_far

    return locals()


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
