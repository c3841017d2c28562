"""Positions of a warpgroup's accumulators, and loads and stores of states.

A thread has rows r and r + 8 of accumulators [64, 8 * n], in quads of two neighbours of the one and two of the other
(`tile.fragment.accumulator`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...compiler.backend import Members, cuda, f32, i32, i64, noun, u32, verb
from ...tile.epilogue import opaque_f32
from ...tile.products import opaque_i32
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.unrolled import one_after_another
from .config import BOX


@verb
def row_of(tid):
    """Return the upper one of a thread's two rows."""
    tid = u32(tid)  # unsigned divisions are faster
    return i32(tid % u32(128) // u32(32) * u32(16) + tid % u32(32) // u32(4))


@verb
def column_of(tid):
    """Return the first of a thread's columns."""
    return i32(u32(2) * (u32(tid) % u32(4)))


@verb
def my_row():
    return row_of(cuda.threadIdx.x)


@verb
def my_column():
    return column_of(cuda.threadIdx.x)


@cache
@noun
def fragments_of(columns: int, transposed: bool = False) -> Members:
    """The verbs for a state of `columns` columns; transposed: acc has the state's columns as rows."""
    DOWN, ALONG = (3, 2) if transposed else (2, 3)

    def box_of(number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Registers have fixed numbers: one box at a time. Opaque values keep the compiler from indexing them."""
        FIRST = BOX // 2 * number

        @verb
        def take_box(values, acc, box, _):
            if box == number:
                for e in range(BOX // 2):
                    values[e] = opaque_f32(acc[FIRST + e])

        @verb
        def put_box(acc, values, box, _):
            if box == number:
                for e in range(BOX // 2):
                    acc[FIRST + e] = opaque_f32(values[e])

        return take_box, put_box

    takes, puts = zip(*(box_of(number) for number in range(columns // BOX)))
    take, put = one_after_another(takes), one_after_another(puts)

    @verb
    def _move(acc, state, place, first, limits, loads):
        mine, box = i32(cuda.threadIdx.x), i32(0)
        tid = shfl_idx_i32(
            mine, i32(u32(mine) % u32(32)), FULL_WARP
        )  # mine, but registers keep nothing computed from it until then
        d, column = i32(first[0] + row_of(tid)), i32(first[1] + column_of(tid))
        values = cuda.local.array(BOX // 2, f32)
        while box < columns // BOX:
            take(values, acc, box, 0)
            for j in range(BOX // 8):
                for half in range(2):
                    for e in range(2):
                        along = i32(column + BOX * box + 8 * j + e)
                        if d + 8 * half < limits[0] and along < limits[1]:
                            at = place + i64(d + 8 * half) * state.strides[DOWN] + i64(along) * state.strides[ALONG]
                            if loads:
                                values[4 * j + 2 * half + e] = state.data[at]
                            else:
                                state.data[at] = values[4 * j + 2 * half + e]
            if loads:
                put(acc, values, box, 0)
            box = opaque_i32(box + 1)

    @verb
    def load(acc, state, place, first, limits):
        """Load a state from `place` on, zeros beyond its rows and columns. first: row and column of acc[0]."""
        _move(acc, state, place, first, limits, True)

    @verb
    def store(state, acc, place, first, limits):
        """Store a state, nothing beyond its rows and columns."""
        _move(acc, state, place, first, limits, False)

    return locals()
