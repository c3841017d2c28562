"""What a warpgroup's accumulators go through: decay by rows and columns, and the way of states from and to memory.

Of accumulators [64, 8 * n] a thread has rows r and r + 8, in quads of two neighbours of the one and two of the other
(`tile.fragment.accumulator`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...backend import Namespace, cuda, f32, i32, i64, u32, verb
from ...tile.epilogue import opaque_f32
from ...tile.numbers import numbers
from ...tile.products import opaque_i32
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.unrolled import one_after_another
from ..arguments import decay
from .config import BOX

DTYPE = "bfloat16"


class Fragments(Namespace):
    """The verbs. row: the first one of the warpgroup."""

    decay: Callable[..., None]  # (scores, row, log2_gamma, scale): by the distance of each pair; 0 where it is not seen
    decay_rows: Callable[..., None]  # (o, row, count, log2_gamma, scale): by the distance to what the state knows
    # (acc, state, place, first, limits): from where a state lies on, but beyond its rows and columns; first: of acc
    load: Callable[..., None]
    store: Callable[..., None]  # (state, acc, place, first, limits)


class Tokens(Namespace):
    """The verbs of what a pass adds to its state."""

    weight: Callable[..., Any]  # ((log2_gamma, count, kept_scale), token) -> its factor; 0 from token number count on
    last_chunk: Callable[..., Any]  # (rows) -> the first token of the last one


@verb
def row_of(tid):
    """The upper one of a thread's two rows."""
    tid = u32(tid)  # no sign to look after
    return i32(tid % u32(128) // u32(32) * u32(16) + tid % u32(32) // u32(4))


@verb
def column_of(tid):
    """The first of its columns."""
    return i32(u32(2) * (u32(tid) % u32(4)))


@verb
def my_row():
    return row_of(cuda.threadIdx.x)


@verb
def my_column():
    return column_of(cuda.threadIdx.x)


@cache
def tokens_of(chunk: int, back: bool) -> Tokens:
    """For chunks of so many; back: tokens see those after them."""
    num, power, CHUNK = numbers(f32), decay(DTYPE).power, u32(chunk)

    @verb
    def weight(args, token):
        log2_gamma, count, kept_scale = args
        value = power(log2_gamma, i32(token + 1)) * kept_scale if back else power(log2_gamma, i32(count - 1 - token))
        return value if token < count else num.zero

    @verb
    def last_chunk(rows):
        return i32((u32(rows) - u32(1)) // CHUNK * CHUNK)

    return Tokens(weight=weight, last_chunk=last_chunk)


@cache
def fragments_of(chunk: int, width: int, columns: int, back: bool, transposed: bool = False) -> Fragments:
    """For scores of a chunk, for o of so many columns, its width, and for a state of so many; back: tokens see those
    after them; transposed: acc has the state's columns as rows.
    """
    num, power = numbers(f32), decay(DTYPE).power
    QUADS, SCORE_QUADS = width // 8, chunk // 8
    DOWN, ALONG = (3, 2) if transposed else (2, 3)

    @verb
    def decay_pairs(scores, row, log2_gamma, scale):
        """From the nearest pair of a row on, as the factor falls by gamma^8 from quad to quad."""
        fade = power(log2_gamma, 8)
        for h in range(2):
            for e in range(2):
                first = i32(row + my_row() + 8 * h - my_column() - e)  # the distance to a column of quad 0
                factor = power(log2_gamma, i32((-first if back else first) & 7)) * scale
                for n in range(SCORE_QUADS):
                    j = n if back else SCORE_QUADS - 1 - n
                    seen = first <= 8 * j if back else first >= 8 * j
                    score = scores[4 * j + 2 * h + e] * factor
                    scores[4 * j + 2 * h + e] = score if seen else num.zero
                    factor = factor * fade if seen else factor

    @verb
    def decay_rows(o, row, count, log2_gamma, scale):
        for h in range(2):
            r = i32(row + my_row() + 8 * h)
            factor = power(log2_gamma, max(i32(count - 1 - r), i32(0)) if back else i32(r + 1)) * scale
            for j in range(QUADS):
                for e in range(2):
                    o[4 * j + 2 * h + e] *= factor

    def box_of(number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Of registers, each is known by its number; what is opaque is not indexed instead."""
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
    def move(acc, state, place, first, limits, loads):
        mine, box = i32(cuda.threadIdx.x), i32(0)
        tid = shfl_idx_i32(
            mine, i32(u32(mine) % u32(32)), FULL_WARP
        )  # mine, but nobody keeps what follows from it until then
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
        move(acc, state, place, first, limits, True)

    @verb
    def store(state, acc, place, first, limits):
        move(acc, state, place, first, limits, False)

    return Fragments(decay=decay_pairs, decay_rows=decay_rows, load=load, store=store)
