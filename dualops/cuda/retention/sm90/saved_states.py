"""States between chunks in memory, in the order of a walk's threads: the walk forth stores them for the walk back,
whose threads have the same elements. Four neighbouring accumulators of a thread are next to those of the next thread.
"""

from __future__ import annotations

from functools import cache

from ...compiler.backend import Members, cuda, f32, i32, i64, noun, verb
from ...tile.numbers import numbers
from ...tile.products import anew_i32
from ...tile.storage import storage
from .config import CONSUMERS

FOUR = 4
THREADS = 128 * CONSUMERS


@cache
@noun
def saved_states(Dv: int) -> Members:
    """The verbs for accumulators [64, Dv] of each warpgroup. Called by the consumers. at: where the state begins."""
    mem, num, QUADS = storage("float32"), numbers(f32), Dv // 8

    @verb
    def _mine(at):
        return at + i64(FOUR * anew_i32(i32(cuda.threadIdx.x)))

    @verb
    def put(states, at, acc):
        first = _mine(at)
        for j in range(QUADS):
            mem.store_kept(states.data, first + FOUR * THREADS * j, True, acc, FOUR * j)

    @verb
    def product(states, at, acc):
        """Return the sum of a thread's stored numbers times its own."""
        first, four = _mine(at), cuda.local.array(FOUR, f32)
        total = num.zero
        for j in range(QUADS):
            mem.load_vector(four, 0, states.data, first + FOUR * THREADS * j, True, 0)
            for e in range(FOUR):
                total += four[e] * acc[FOUR * j + e]
        return total

    return locals()
