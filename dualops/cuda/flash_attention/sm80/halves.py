"""Two warps that have halves of the columns of the same two strips change them: each has all columns of one then."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...backend import Namespace, cuda, f32, i32, verb
from ...tile.numbers import numbers


class Halves(Namespace):
    """The verb, by all threads of a block: warps w and w + 4 are two. mine: 0 of the first, 1 of the other."""

    swap: Callable[..., None]  # (floats, acc, mine): floats is shared memory that nobody reads any more


@cache
def halves_of(size: int, at: int, threads: int) -> Halves:
    """acc: so many numbers, of two strips; at: the byte from which on there is room for half of them of all threads."""
    num, FIRST, HALF, STEP = numbers(f32), at // 4, size // 2, 4 * threads

    @verb
    def swap(floats, acc, mine):
        tid = i32(cuda.threadIdx.x)
        to, own = i32(FIRST + 4 * (tid ^ 128)), i32(FIRST + 4 * tid)
        if mine == 0:  # constants are what registers can be named by
            for e in range(0, HALF, 4):
                num.store_vector(floats, i32(to + e // 4 * STEP), acc, HALF + e)
        else:
            for e in range(0, HALF, 4):
                num.store_vector(floats, i32(to + e // 4 * STEP), acc, e)
        cuda.syncthreads()
        if mine == 0:
            for e in range(0, HALF, 4):
                num.load_four(acc, HALF + e, floats, i32(own + e // 4 * STEP))
        else:
            for e in range(0, HALF, 4):
                num.load_four(acc, e, floats, i32(own + e // 4 * STEP))

    return Halves(swap=swap)
