"""Products of a strip, the 16 rows of a warp, whose one factor has 16 bits and whose other one is float32.

    pv = strip_of_floats("float16", v_box, boxes)                acc [16, n] += P @ V, P as sums lie in registers
    kv = strip_of_weighted("bfloat16", k_box, v_box, boxes, 2)   acc [16, n] += (weights * K).T @ V
    qs = strip_by_floats("bfloat16", q_box, state_box, boxes)    acc [16, n] += Q @ state, which is float32 in memory

tf32 holds either 16-bit type as it is, with float32's range, and of a float32 the upper 11 bits, or as two parts nearly
all. A lane has columns 2 * t and 2 * t + 1 of each eight where tf32's left factor wants t and t + 4, and a word of a
right factor in 16 bits holds lines 2 * t and 2 * t + 1: the steps of a sum have any order, so that both fit as they
are, and of a factor in float32 the lines lie so (`tile_copies.paired_line`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, f32, i32, u32, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits
from ..ptx.convert import unpack_bf16x2, unpack_f16x2
from ..ptx.memory import ld_shared_v2_f32
from ..ptx.mma import mma_m16n8k8_tf32
from .softmax_rows import PAIRS
from .strips import A_WORDS, ROWS, StripAb
from .tf32 import rounded_word, words_of_parts
from .unrolled import one_after_another
from .warp_mma import FactorSlice, fragments

UNPACKED = {"bfloat16": unpack_bf16x2, "float16": unpack_f16x2}
STEP = 16  # of a sum, whose words a lane reads at once: two products
NUMBERS = 8  # of a lane, of a left factor, for so many


class WeightedStrip(Namespace):
    """sums [16, columns] += (weights * X).T @ Y. Lines of X and Y are steps of the sum."""

    size: int  # sums of a thread
    fragment: Callable[..., Any]  # () -> zeros
    place: Callable[..., Any]  # (column) -> where this lane reads the 16 columns of X from `column` on
    # (sums, smem, (x_place, y_at), (floats, weights_at)): weights are float32 in shared memory, one of each line
    add: Callable[..., None]


class StripByFloats(Namespace):
    """sums [16, columns] += A @ B, some steps of A's lines at a time. Lines of B run along its columns."""

    # (sums, smem, (a_place, first), (floats, b_at)): first: A's step that meets B's first line, of 16 a multiple
    add: Callable[..., None]


def _cleared(size: int) -> Callable[..., Any]:
    ZERO = f32(0)

    @verb
    def fragment():
        sums = cuda.local.array(size, f32)
        for e in range(size):
            sums[e] = ZERO
        return sums

    return fragment


@verb
def place_of(word):
    """Which of a lane's numbers that lie as sums do is this word: rows r and r + 8 of column t, then of t + 4."""
    return word // A_WORDS * A_WORDS + word % 2 * 2 + word % A_WORDS // 2


def _step(dtype: str, b: FactorSlice, parts: int) -> Callable[..., None]:
    """The verb (sums, first, left, at, smem, b_place, step): a box's products of a step; left[at:]: NUMBERS words of
    upper parts, then those of lower ones, if there are two parts.
    """
    mma, unpack, b_side = mma_m16n8k8_tf32, UNPACKED[dtype], fragments(b, b.rows, left=False)
    PARTS, WORDS = parts, b_side.words

    @verb
    def multiply(sums, first, left, at, smem, b_place, step):
        packed, right = b_side.make(), cuda.local.array(2, u32)
        b_side.read(packed, 0, smem, b_place, step)
        for word in range(WORDS):
            j, half = word // 2, word % 2
            even, odd = unpack(packed[word])
            right[0], right[1] = bits_of_f32(even), bits_of_f32(odd)
            if PARTS == 2:
                mma(sums, first + 4 * j, left, at + (NUMBERS + A_WORDS * half), right, 0)
            mma(sums, first + 4 * j, left, at + A_WORDS * half, right, 0)

    return multiply


@cache
def strip_of_floats(dtype: str, b: FactorSlice, boxes: int) -> StripAb:
    """As `strips.strip_ab` of a 16-bit type, but A is rounded to tf32, which has float32's range. b: its boxes."""
    STEPS, SIZE, WORDS = b.depth // STEP, b.rows // 2 * boxes, b.depth // 2
    b_side, multiply, BOX = fragments(b, b.rows, left=False), _step(dtype, b, 1), b.size

    @verb
    def left():
        return cuda.local.array(WORDS, u32)

    @verb
    def put(a, values):
        for word in range(WORDS):
            a[word] = rounded_word(bits_of_f32(values[place_of(word)]))

    def step_of(n: int) -> Callable[..., None]:
        NUMBER, BOX_NUMBER = n // boxes, n % boxes
        FIRST = BOX_NUMBER * (b.rows // 2)

        @verb
        def add_step(sums, a, smem, b_place):
            multiply(sums, FIRST, a, NUMBERS * NUMBER, smem, i32(b_place + BOX_NUMBER * BOX), NUMBER)

        return add_step

    add_all = one_after_another([step_of(n) for n in range(STEPS * boxes)])

    @verb
    def add(sums, a, smem, b_at):
        add_all(sums, a, smem, i32(b_at + b_side.start(0)))

    return StripAb(size=SIZE, fragment=_cleared(SIZE), left=left, put=put, add=add)


@cache
def rounding_left(dtype: str, boxed: bool) -> Callable[..., Any]:
    """The verb (a, b) -> what rounding takes from two neighbours of a left factor: to the dtype, or (boxed) to tf32;
    nothing of what is not finite.
    """
    pack, unpack, ZERO = PAIRS[dtype], UNPACKED[dtype], f32(0)

    @verb
    def rest(less):
        return less if less == less else ZERO

    @verb
    def of_words(a, b):
        low, high = unpack(pack(a, b))
        return rest(a - low), rest(b - high)

    @verb
    def of_tf32(a, b):
        low, high = f32_of_bits(rounded_word(bits_of_f32(a))), f32_of_bits(rounded_word(bits_of_f32(b)))
        return rest(a - low), rest(b - high)

    return of_tf32 if boxed else of_words


@cache
def strip_of_weighted(dtype: str, x: FactorSlice, y: FactorSlice, boxes: int, parts: int) -> WeightedStrip:
    """x: its box; y: its boxes, of which there are so many. parts: of tf32, that a number of X times its weight is
    multiplied as: one, or two, whose sum has nearly all digits of float32.
    """
    x_side, y_side = fragments(x, ROWS, left=True), fragments(y, y.rows, left=False)
    unpack, multiply = UNPACKED[dtype], _step(dtype, y, parts)
    STEPS, SIZE, BOX, OF_BOX, PARTS = y.depth // STEP, y.rows // 2 * boxes, y.size, y.rows // 2, parts

    @verb
    def place(column):
        return x_side.start(column)

    def step_of(n: int) -> Callable[..., None]:
        of_box = one_after_another([box_of(n, box) for box in range(boxes)])

        @verb
        def add_step(sums, smem, places, weights):
            (x_place, y_place), (floats, weights_at) = places, weights
            words, values, left = x_side.make(), cuda.local.array(NUMBERS, f32), cuda.local.array(2 * NUMBERS, u32)
            x_side.read(words, 0, smem, x_place, n)
            mine = i32(weights_at + 2 * (cuda.threadIdx.x % 4))
            for half in range(2):  # eight steps each
                here, next_one = ld_shared_v2_f32(floats, i32(mine + (STEP * n + 8 * half)))
                for row in range(2):
                    word = 2 * half + row
                    even, odd = unpack(words[word])
                    values[2 * word], values[2 * word + 1] = even * here, odd * next_one
            for word in range(NUMBERS):
                value = values[place_of(word)]
                if PARTS == 2:
                    left[word], left[NUMBERS + word] = words_of_parts(value)
                else:
                    left[word] = rounded_word(bits_of_f32(value))
            of_box(sums, left, smem, y_place)

        return add_step

    def box_of(n: int, box: int) -> Callable[..., None]:
        @verb
        def add_box(sums, left, smem, y_place):
            multiply(sums, OF_BOX * box, left, 0, smem, i32(y_place + box * BOX), n)

        return add_box

    add_all = one_after_another([step_of(n) for n in range(STEPS)])

    @verb
    def add(sums, smem, places, weights):
        x_place, y_at = places
        add_all(sums, smem, (x_place, i32(y_at + y_side.start(0))), weights)

    return WeightedStrip(size=SIZE, fragment=_cleared(SIZE), place=place, add=add)


@cache
def strip_by_floats(dtype: str, a: FactorSlice, b: FactorSlice, boxes: int) -> StripByFloats:
    """a: its boxes; b: its boxes of float32 along "row", so many side by side, whose lines lie as `paired_line` says.
    B is rounded to tf32.
    """
    a_side, b_side, mma = fragments(a, ROWS, left=True), fragments(b, b.rows, left=False), mma_m16n8k8_tf32
    unpack, TILES, BOX, A_BOX = UNPACKED[dtype], b.rows // 8, b.size, a.size
    STEPS, IN_BOX = b.depth // STEP, a.depth // STEP

    def step_of(n: int) -> Callable[..., None]:
        def box_of(box: int) -> Callable[..., None]:
            @verb
            def add_box(sums, left, floats, b_place):
                right = b_side.make()
                for half in range(2):
                    b_side.read(right, 0, floats, i32(b_place + box * BOX), 2 * n + half)
                    for word in range(2 * TILES):
                        right[word] = rounded_word(right[word])
                    for j in range(TILES):
                        mma(sums, 4 * (box * TILES + j), left, A_WORDS * half, right, 2 * j)

            return add_box

        of_boxes = one_after_another([box_of(box) for box in range(boxes)])

        @verb
        def add_step(sums, smem, place, factor):
            (a_place, first), (floats, b_place) = place, factor
            words, left = a_side.make(), cuda.local.array(2 * A_WORDS, u32)
            step = i32(u32(first) // u32(STEP) + u32(n))
            box = i32(u32(step) // u32(IN_BOX))
            a_side.read(words, 0, smem, i32(a_place + box * A_BOX), i32(step - box * IN_BOX))
            for half in range(2):
                for row in range(2):
                    even, odd = unpack(words[2 * half + row])
                    left[A_WORDS * half + row], left[A_WORDS * half + 2 + row] = bits_of_f32(even), bits_of_f32(odd)
            of_boxes(sums, left, floats, b_place)

        return add_step

    add_all = one_after_another([step_of(n) for n in range(STEPS)])

    @verb
    def add(sums, smem, place, factor):
        floats, b_at = factor
        add_all(sums, smem, place, (floats, i32(b_at + b_side.start(0))))

    return StripByFloats(add=add)
