"""Strips of 16 rows, two and two numbers packed, in swizzled shared memory: for a warp that needs another's, along rows
or along columns.

    words = strip_words(box, strips)        box: a `FactorSlice` whose lines are rows; a warp has `strips`, APART
    words.put(smem, at, packed)             as accumulators lie, packed: the left factor of a product
    words.take(packed, smem, at)            a strip of the same rows that another warp has put
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, cuda, i32, u32, verb
from ..ptx.memory import st_shared_b32
from ..ptx.stmatrix import stmatrix
from .strips import A_WORDS, APART, ROWS
from .unrolled import one_after_another
from .warp_mma import FactorSlice, fragments, swizzled


class StripWords(Namespace):
    """The verbs of a warp, one of four that have neighbouring rows."""

    put: Callable[..., None]  # (smem, at, packed)
    take: Callable[..., None]  # (packed, smem, at)


@cache
def strip_words(box: FactorSlice, strips: int, matrices: bool = False) -> StripWords:
    """Of numbers of 16 bits; at: where the box begins."""
    side, STEPS, PITCH, SHIFT, FLIPS = (
        fragments(box, ROWS, left=True),
        box.depth // box.step,
        box.pitch,
        box.shift,
        box.flips,
    )
    STRIP, EIGHT = APART * PITCH, box.matrix

    def put_word(n: int) -> Callable[..., None]:
        STEP, WORD = n // A_WORDS % STEPS, n % A_WORDS
        FLIP, FURTHER = EIGHT * (2 * STEP + WORD // 2), n // A_WORDS // STEPS * STRIP + WORD % 2 * EIGHT * PITCH

        @verb
        def one(packed, smem, mine, _):
            st_shared_b32(smem, i32((mine ^ FLIP) + FURTHER), packed[n])

        return one

    put_all = one_after_another([put_word(n) for n in range(A_WORDS * STEPS * strips)])

    @verb
    def put(smem, at, packed):
        tid = u32(cuda.threadIdx.x)
        line = tid % u32(128) // u32(32) * u32(ROWS) + tid % u32(32) // u32(4)
        plain = line * u32(PITCH) + u32(2) * (tid % u32(4))
        put_all(packed, smem, i32(at + i32(swizzled(plain, SHIFT, FLIPS))), 0)

    store = stmatrix(4)

    @verb
    def put_matrices(smem, at, packed):
        mine = i32(at + side.start(i32(cuda.threadIdx.x % 128 // 32 * ROWS)))
        for strip in range(strips):
            for step in range(STEPS):
                store(smem, i32((mine ^ (16 * step)) + strip * STRIP), packed, A_WORDS * (strip * STEPS + step))

    @verb
    def take(packed, smem, at):
        mine = i32(at + side.start(i32(cuda.threadIdx.x % 128 // 32 * ROWS)))
        for strip in range(strips):
            for step in range(STEPS):
                side.read(packed, strip * STEPS + step, smem, i32(mine + strip * STRIP), step)

    return StripWords(put=put_matrices if matrices else put, take=take)
