"""What a warpgroup's accumulators go through: decay by rows and columns, and the way of states from and to memory.

Of accumulators [64, 8 * n] a thread has rows r and r + 8, in quads of two neighbours of the one and two of the other
(`tile.fragment.accumulator`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...backend import Namespace, cuda, f32, i32, i64, verb
from ...tile.numbers import numbers
from ..arguments import decay
from .config import CHUNK

DTYPE = "bfloat16"


class Fragments(Namespace):
    """The verbs. row: the first one of the warpgroup."""

    decay: Callable[..., None]  # (scores, row, log2_gamma, scale): by the distance of each pair; 0 where it is not seen
    decay_rows: Callable[..., None]  # (o, row, count, log2_gamma, scale): by the distance to what the state knows
    load: Callable[..., None]  # (acc, state, place, row, call): from where it lies on, but beyond its rows and columns
    store: Callable[..., None]  # (state, acc, place, row, call)


@verb
def my_row():
    """The upper one of this thread's two rows."""
    return i32(cuda.threadIdx.x % 128 // 32 * 16 + cuda.threadIdx.x % 32 // 4)


@verb
def my_column():
    """The first of its columns."""
    return i32(2 * (cuda.threadIdx.x % 4))


@cache
def fragments_of(Dv: int, back: bool) -> Fragments:
    """For scores of a chunk, and for o and a state of Dv columns; back: tokens see those after them."""
    num, power = numbers(f32), decay(DTYPE).power
    QUADS, SCORE_QUADS = Dv // 8, CHUNK // 8

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

    @verb
    def load(acc, state, place, row, call):
        for half in range(2):
            d = i32(row + my_row() + 8 * half)
            at = place + i64(d) * state.strides[2]
            for j in range(QUADS):
                for e in range(2):
                    column = i32(8 * j + my_column() + e)
                    if d < call.D and column < call.Dv:
                        acc[4 * j + 2 * half + e] = state.data[at + column * state.strides[3]]

    @verb
    def store(state, acc, place, row, call):
        for half in range(2):
            d = i32(row + my_row() + 8 * half)
            at = place + i64(d) * state.strides[2]
            for j in range(QUADS):
                for e in range(2):
                    column = i32(8 * j + my_column() + e)
                    if d < call.D and column < call.Dv:
                        state.data[at + column * state.strides[3]] = acc[4 * j + 2 * half + e]

    return Fragments(decay=decay_pairs, decay_rows=decay_rows, load=load, store=store)
