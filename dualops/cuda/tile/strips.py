"""Products of a strip, a warp's 16 rows, by a factor in boxes of swizzled shared memory (`tile_copies`).

    qk = strip_abt("bfloat16", q_box, k_box, boxes, held=True)       scores [16, BLOCK_KV] = Q @ K.T
    pv = strip_ab("bfloat16", v_box, boxes)                          acc [16, Dv] += P @ V
    pv.put(probs, scores)                                            P from sums in registers

Sums have the layout of `fragment.accumulator`. Packed in pairs, they are the left factor of the next product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, f32, i32, kept_noun, members, u32, verb
from ..ptx.mma import mma_m16n8k16
from .softmax_rows import PAIRS
from .unrolled import local_array, unrolled, zeros
from .warp_mma import MMA_TYPES, FactorSlice, fragments, warp_products

ROWS = 16
A_WORDS = 4  # per step


class Places(NamedTuple):
    """The places at which a lane begins to read two factors."""

    a: Any
    b: Any


@kept_noun
def strip_abt(dtype: str, a: FactorSlice, b: FactorSlice, boxes: int, *, held: bool) -> Members:
    """sums [16, columns] = A @ B.T. Lines of A and B run along the sum.

    a, b: one box of each factor; each factor has `boxes` boxes. held: A's fragments stay in registers; otherwise they
    are read each time.
    """
    a_side, b_side = fragments(a, ROWS, left=True), fragments(b, b.rows, left=False)
    STEPS, TILES, A_BOX, B_BOX = a.depth // a.step, b.rows // 8, a.size, b.size
    SIZE, WORDS, ZERO = 4 * TILES, A_WORDS * (boxes * STEPS if held else 1), f32(0)
    products, mma = warp_products(dtype, ROWS, b.rows), mma_m16n8k16(MMA_TYPES[dtype])

    @verb
    def place(row, at):
        """Return the place at which this lane reads the 16 rows of A from `row` on; A begins at `at`."""
        return i32(at + a_side.start(row))

    @verb
    def hold(smem, place):
        """Return A's fragments, if they are held."""
        frag = cuda.local.array(WORDS, u32)
        if held:
            for n in range(boxes * STEPS):
                a_side.read(frag, n, smem, i32(place + n // STEPS * A_BOX), n % STEPS)
        return frag

    steps = [(n, n // STEPS, n % STEPS) for n in range(boxes * STEPS)]

    @unrolled(steps)
    def _add_held(sums, a_frag, smem, places, n, box, step):
        b_frag = b_side.make()
        b_side.read(b_frag, 0, smem, i32(places.b + box * B_BOX), step)
        for j in range(TILES):
            mma(sums, 4 * j, a_frag, A_WORDS * n, b_frag, 2 * j)

    @unrolled(steps)
    def _add_read(sums, _, smem, places, __, box, step):
        a_frag, b_frag = a_side.make(), b_side.make()
        for n in range(1):  # without the loop, retention of unaligned rows would spill
            a_side.read(a_frag, n, smem, i32(places.a + (box * A_BOX + n * A_BOX)), step)
        b_side.read(b_frag, 0, smem, i32(places.b + box * B_BOX), step)
        products.multiply(sums, a_frag, b_frag, 0)

    add_all = _add_held if held else _add_read

    @verb
    def multiply(sums, a_frag, smem, place, b_at):
        for e in range(SIZE):
            sums[e] = ZERO
        add_all(sums, a_frag, smem, Places(place, i32(b_at + b_side.start(0))))

    return members(
        locals(),
        size=SIZE,  # sums per thread
        fragment=local_array(SIZE, f32),  # () -> sums
    )


@kept_noun
def strip_ab(dtype: str, b: FactorSlice, boxes: int) -> Members:
    """sums [16, columns] += A @ B. Lines of B run along its columns. b: a box of B, which has `boxes` of them as
    columns.
    """
    mma, pair, b_side = mma_m16n8k16(MMA_TYPES[dtype]), PAIRS[dtype], fragments(b, b.rows, left=False)
    STEPS, TILES, B_BOX, SIZE = b.depth // b.step, b.rows // 8, b.size, b.rows // 2 * boxes
    WORDS = A_WORDS * STEPS

    @verb
    def put(a_frag, values):
        """Make A of numbers in the layout of sums."""
        for word in range(WORDS):
            a_frag[word] = pair(values[2 * word], values[2 * word + 1])

    @unrolled((n // boxes, n % boxes) for n in range(STEPS * boxes))
    def _add(sums, a_frag, smem, b_place, step, box):
        b_frag = b_side.make()
        b_side.read(b_frag, 0, smem, i32(b_place + box * B_BOX), step)
        for j in range(TILES):
            mma(sums, 4 * (box * TILES + j), a_frag, A_WORDS * step, b_frag, 2 * j)

    @verb
    def add(sums, a_frag, smem, b_at):
        _add(sums, a_frag, smem, i32(b_at + b_side.start(0)))

    return members(
        locals(),
        size=SIZE,  # sums per thread
        fragment=zeros(SIZE),  # () -> sums
        left=local_array(WORDS, u32),  # () -> a_frag
    )
