"""Products of a strip, a warp's 16 rows, by a factor in boxes of swizzled shared memory (`tile_copies`).

    qk = strip_abt("bfloat16", q_box, k_box, boxes, held=True)       scores [16, BLOCK_KV] = Q @ K.T
    pv = strip_ab("bfloat16", v_box, boxes)                          acc [16, Dv] += P @ V
    pv.put(probs, scores)                                            P from sums in registers

Sums have the layout of `fragment.accumulator`. Packed in pairs, they are the left factor of the next product. float32
factors are multiplied as two parts of tf32 each, without the product of the two lower parts. A lane then has columns
2 * t and 2 * t + 1 of each eight, but the left factor needs t and t + 4. So B's lines are stored in that order
(`paired`). Tensor cores round toward zero. So for float32, the products of each box are summed separately, and then
added to the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, f32, i32, kept_noun, members, u32, verb
from ..ptx.arithmetic import f32_of_bits, opaque_i32
from ..ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from .softmax_rows import PAIRS
from .tf32 import words_of_parts
from .unrolled import local_array, one_after_another, zeros
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
    products = warp_products(dtype, ROWS, b.rows, dtype == "float32")
    if held and dtype == "float32":
        raise ValueError("fragments in float32 are split where they are read, and can't be held")

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

    def step_held(n: int) -> Callable[..., None]:
        BOX, STEP, mma = n // STEPS, n % STEPS, mma_m16n8k16(MMA_TYPES[dtype])

        @verb
        def add_step(sums, a_frag, smem, places):
            b_frag = b_side.make()
            b_side.read(b_frag, 0, smem, i32(places.b + BOX * B_BOX), STEP)
            for j in range(TILES):
                mma(sums, 4 * j, a_frag, A_WORDS * n, b_frag, 2 * j)

        return add_step

    def step_read(n: int) -> Callable[..., None]:
        BOX, STEP = n // STEPS, n % STEPS

        @verb
        def add_step(sums, _, smem, places):
            a_frag, b_frag = a_side.make(), b_side.make()
            a_side.read(a_frag, 0, smem, i32(places.a + BOX * A_BOX), STEP)
            b_side.read(b_frag, 0, smem, i32(places.b + BOX * B_BOX), STEP)
            products.multiply(sums, a_frag, b_frag, 0)

        return add_step

    @verb
    def _add_boxes(sums, a_frag, smem, places):
        box = i32(0)
        while box < boxes:
            piece = products.make()
            add_of_box(piece, a_frag, smem, Places(i32(places.a + box * A_BOX), i32(places.b + box * B_BOX)))
            products.add_to(sums, piece)
            box = opaque_i32(box + 1)

    if dtype == "float32":
        add_of_box, add_all = one_after_another([step_read(n) for n in range(STEPS)]), _add_boxes
    else:
        step = step_held if held else step_read
        add_all = one_after_another([step(n) for n in range(boxes * STEPS)])

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
    words, put, add_all = _ab_of_parts(b, boxes) if dtype == "float32" else _ab_of_pairs(dtype, b, boxes)
    b_side, size = fragments(b, b.rows, left=False), b.rows // 2 * boxes

    @verb
    def add(sums, a_frag, smem, b_at):
        add_all(sums, a_frag, smem, i32(b_at + b_side.start(0)))

    return members(
        locals(),
        size=size,  # sums per thread
        fragment=zeros(size),  # () -> sums
        left=local_array(words, u32),  # () -> a_frag
        put=put,  # (a_frag, values): make A of numbers in the layout of sums
    )


def _ab_of_pairs(dtype: str, b: FactorSlice, boxes: int) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """Return the words of A, and the verbs `put` and `add` (with the lane's place), for 16-bit factors."""
    mma, pair, b_side = mma_m16n8k16(MMA_TYPES[dtype]), PAIRS[dtype], fragments(b, b.rows, left=False)
    STEPS, TILES, B_BOX = b.depth // b.step, b.rows // 8, b.size
    WORDS = A_WORDS * STEPS

    @verb
    def put(a_frag, values):
        for word in range(WORDS):
            a_frag[word] = pair(values[2 * word], values[2 * word + 1])

    def step(n: int) -> Callable[..., None]:
        STEP, BOX = n // boxes, n % boxes

        @verb
        def add_step(sums, a_frag, smem, b_place):
            b_frag = b_side.make()
            b_side.read(b_frag, 0, smem, i32(b_place + BOX * B_BOX), STEP)
            for j in range(TILES):
                mma(sums, 4 * (BOX * TILES + j), a_frag, A_WORDS * STEP, b_frag, 2 * j)

        return add_step

    return WORDS, put, one_after_another([step(n) for n in range(STEPS * boxes)])


def _ab_of_parts(b: FactorSlice, boxes: int) -> tuple[int, Callable[..., None], Callable[..., None]]:
    """The same for float32: a step's upper parts, then its lower parts."""
    mma, b_side = mma_m16n8k8_tf32, fragments(b, b.rows, left=False)
    STEPS, TILES, B_BOX, B_WORDS = b.depth // b.step, b.rows // 8, b.size, b_side.words
    SIZE, new_piece = 4 * TILES, zeros(4 * TILES)

    @verb
    def put(a_frag, values):
        for step in range(STEPS):
            for word in range(A_WORDS):  # rows r and r + 8 of column t, then of column t + 4
                value = values[4 * step + word % 2 * 2 + word // 2]
                upper, lower = words_of_parts(value)
                a_frag[2 * A_WORDS * step + word] = upper
                a_frag[2 * A_WORDS * step + A_WORDS + word] = lower

    def step_of(step: int) -> Callable[..., None]:
        @verb
        def add_step(piece, a_frag, smem, b_place):
            b_frag, b_lower = b_side.make(), cuda.local.array(B_WORDS, u32)
            b_side.read(b_frag, 0, smem, b_place, step)
            for word in range(B_WORDS):
                b_frag[word], b_lower[word] = words_of_parts(f32_of_bits(b_frag[word]))
            for j in range(TILES):
                mma(piece, 4 * j, a_frag, 2 * A_WORDS * step + A_WORDS, b_frag, 2 * j)
            for j in range(TILES):
                mma(piece, 4 * j, a_frag, 2 * A_WORDS * step, b_lower, 2 * j)
            for j in range(TILES):
                mma(piece, 4 * j, a_frag, 2 * A_WORDS * step, b_frag, 2 * j)

        return add_step

    def to_box(known: int) -> Callable[..., None]:
        @verb
        def add_piece(sums, piece, box, _):
            if box == known:  # registers need constant indices
                for e in range(SIZE):
                    sums[SIZE * known + e] += piece[e]

        return add_piece

    add_steps = one_after_another([step_of(step) for step in range(STEPS)])
    add_piece = one_after_another([to_box(box) for box in range(boxes)])

    @verb
    def add(sums, a_frag, smem, b_place):
        box = i32(0)
        while box < boxes:
            piece = new_piece()
            add_steps(piece, a_frag, smem, i32(b_place + box * B_BOX))
            add_piece(sums, piece, box, 0)
            box = opaque_i32(box + 1)

    return 2 * A_WORDS * STEPS, put, add
