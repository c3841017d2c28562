"""Sums of columns over the rows of several warps' accumulators, in an order that no warp can change.

    sums = column_sums(at, columns, warps)          one of `columns` is of every thread's accumulators
    mine = sums.values()                            of each of a thread's columns, the sum of its own rows
    sums.put(smem, turn, mine)                      my warp's sums, to shared memory
    ... all warps meet ...
    total = sums.total(smem, turn, column)          of all warps

Element e of a thread's accumulators is where `fragment.accumulator` says: eight lanes have the same columns, two
neighbours of each eight. They meet by halves: each sends those sums that another keeps, 28 shuffles for 32 columns.
Turns are even and odd: those of one are read while those of the next one are put, so that warps meet once a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..compiler.backend import Members, cuda, f32, i32, members, noun, u32, verb
from ..tile.numbers import numbers
from ..tile.products import anew_i32
from ..tile.rows import FULL_WARP
from ..tile.unrolled import one_after_another
from .floats import load_float, st_shared_v2_f32, store_float

EIGHT = 8  # columns


def column_sums_bytes(columns: int, warps: int) -> int:
    """Shared memory, of both turns."""
    return 2 * 4 * columns * warps


@cache
@noun
def column_sums(at: int, columns: int, warps: int) -> Members:
    """The verbs for so many columns, a multiple of 32; shared memory begins at byte `at`.

    A thread's columns are numbered as they lie, two of each eight.
    """
    num, size, line = numbers(f32), columns // 4, 4 * columns

    def halve(distance: int, first: int, count: int) -> Callable[..., None]:
        """Of the first `count` pairs of values that are as many apart, lanes keep one and get the other's share."""
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
        """Write the values to shared memory; by all lanes of a warp. The values are changed."""
        tid = anew_i32(i32(cuda.threadIdx.x))
        lane, warp = i32(u32(tid) % u32(32)), i32(u32(tid) // u32(32))
        halve_all(values, lane, 0, 0)
        first = i32(at + (turn * warps + warp) * line + lane // 4 * (line // 8) + lane % 4 * 8)
        for n in range(size // 16):
            st_shared_v2_f32(smem, i32(first + n * 4 * EIGHT), values[2 * n], values[2 * n + 1])

    @verb
    def total(smem, turn, column):
        """Return the total of a column, once all warps have put theirs."""
        first = i32(at + turn * warps * line + 4 * column)
        sum_so_far = load_float(smem, first)
        for warp in range(1, warps):
            sum_so_far += load_float(smem, i32(first + warp * line))
        return sum_so_far

    return members(
        locals(),
        size=size,  # columns of a thread
    )


def warp_sums_bytes(warps: int) -> int:
    """Shared memory, of both turns."""
    return 2 * 4 * warps


@cache
@noun
def warp_sums(at: int, warps: int) -> Members:
    """A number of each warp; turns as above.

    For so many warps; shared memory begins at byte `at`.
    """
    num = numbers(f32)

    @verb
    def put(smem, turn, x):
        """Write the number of my warp; by all its lanes, which have the same."""
        tid = u32(anew_i32(i32(cuda.threadIdx.x)))
        if tid % u32(32) == u32(0):
            store_float(smem, i32(at + 4 * (turn * warps + i32(tid // u32(32)))), x)

    @verb
    def total(smem, turn):
        """Return the total of all warps, once they have met."""
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
