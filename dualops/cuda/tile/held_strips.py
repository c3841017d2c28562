"""Two strips of 16 rows of a warp, APART, whose fragments stay in registers, by parts of boxes.

kq = held_strips("bfloat16", k_box, q_part, boxes, q_box.size)      scores [2 strips, part of queries] = K @ Q.T
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import cuda, f32, i32, u32, verb
from ..ptx.mma import mma_m16n8k16
from .strips import A_WORDS, APART, ROWS, Places, StripAbt
from .unrolled import one_after_another
from .warp_mma import MMA_TYPES, FactorSlice, fragments

STRIPS = 2


@cache
def held_strips(dtype: str, a: FactorSlice, b: FactorSlice, boxes: int, b_box: int) -> StripAbt:
    """As `strip_abt` has it. b: the lines of a box that are read at a time; b_box: from a box to the next."""
    a_side, b_side, mma = (
        fragments(a, ROWS, left=True),
        fragments(b, b.rows, left=False),
        mma_m16n8k16(MMA_TYPES[dtype]),
    )
    STEPS, TILES, A_BOX, STRIP = a.depth // a.step, b.rows // 8, a.size, APART * a.line
    SIZE, COUNT, ZERO = 4 * TILES * STRIPS, boxes * (a.depth // a.step), f32(0)
    WORDS = A_WORDS * STRIPS * COUNT

    @verb
    def fragment():
        return cuda.local.array(SIZE, f32)

    @verb
    def place(row, at):
        return i32(at + a_side.start(row))

    @verb
    def hold(smem, place):
        frag = cuda.local.array(WORDS, u32)
        for n in range(COUNT):
            for strip in range(STRIPS):
                a_side.read(
                    frag, STRIPS * n + strip, smem, i32(place + (n // STEPS * A_BOX + strip * STRIP)), n % STEPS
                )
        return frag

    def step(n: int) -> Callable[..., None]:
        BOX, STEP = n // STEPS, n % STEPS

        @verb
        def add_step(sums, a_frag, smem, places):
            b_frag = b_side.make()
            b_side.read(b_frag, 0, smem, i32(places.b + BOX * b_box), STEP)
            for strip in range(STRIPS):
                for j in range(TILES):
                    mma(sums, 4 * (strip * TILES + j), a_frag, A_WORDS * (STRIPS * n + strip), b_frag, 2 * j)

        return add_step

    add_all = one_after_another([step(n) for n in range(COUNT)])

    @verb
    def multiply(sums, a_frag, smem, place, b_at):
        for e in range(SIZE):
            sums[e] = ZERO
        add_all(sums, a_frag, smem, Places(place, i32(b_at + b_side.start(0))))

    return StripAbt(size=SIZE, fragment=fragment, place=place, hold=hold, multiply=multiply)
