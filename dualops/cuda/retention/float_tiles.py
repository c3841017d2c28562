"""Rows of float32 numbers as the right factor of a warp's products with 16-bit rows. Threads load them.

    tile = float_tile("bfloat16", a_boxes, LINES, COLUMNS, threads, aligned)
    tile.fetch(values, lines, columns)                     start the loads to registers, overlapped with products
    tile.put(smem, floats, at, values)                     round the numbers and store them to shared memory
    tile.add(sums, smem, floats, (a_place, first), at)     sums [16, COLUMNS] += A [16, LINES] @ it

If A is bfloat16, which has float32's range, numbers are rounded to bfloat16. If A is float16, they are rounded to tf32,
which has that range too and contains every float16. For each eight columns of A a lane has 2 * t and 2 * t + 1, but
tf32's left factor wants t and t + 4. The lines are stored in that order (`tile_copies.paired_line`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..compiler.backend import Members, cuda, f32, i32, i64, members, noun, u32, verb
from ..ptx.arithmetic import bits_of_f32
from ..ptx.convert import pack_bf16x2, unpack_f16x2
from ..ptx.memory import st_shared_b32
from ..ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from ..tile.storage import access
from ..tile.strips import A_WORDS, ROWS
from ..tile.tf32 import rounded
from ..tile.tile_copies import paired_line
from ..tile.unrolled import one_after_another
from ..tile.warp_mma import MMA_TYPES, FactorSlice, fragments, swizzled

FOUR = 4  # neighbours that a thread loads
STEP = 16  # steps of a sum whose words of A a lane reads at once


@cache
@noun
def float_tile(dtype: str, a: FactorSlice, lines: int, columns: int, threads: int, aligned: bool) -> Members:
    """The verbs. smem: shared memory as elements of 16 bits.

    a: A's boxes. aligned: lines are whole 16-byte vectors. Raises ValueError if the threads can't split a tile evenly.
    """
    as_words = dtype == "bfloat16"
    box = FactorSlice("row", 64, lines) if as_words else FactorSlice("row", 32, lines, 4)
    boxes, vec, PITCH, SHIFT, FLIPS = columns // box.pitch, access("float32", aligned), box.pitch, box.shift, box.flips
    LINE = columns // FOUR  # threads for a line
    LINES = threads // LINE  # lines from a thread's to its next
    COUNT = lines // LINES
    if threads % LINE or LINES & (LINES - 1) or lines != COUNT * LINES:
        raise ValueError(f"{threads} threads can't share {lines} lines of {columns} numbers")

    @verb
    def values():
        """Return a local array for the numbers."""
        return cuda.local.array(FOUR * COUNT, f32)

    @verb
    def fetch(values, lines, columns):
        """Load `columns` numbers of each line (`shared.Lines`), zeros for the others."""
        tid = u32(cuda.threadIdx.x)
        line, column = i32(tid // u32(LINE)), i32(tid % u32(LINE) * u32(FOUR))
        index = i64(lines.first) + i64(line) * i64(lines.step) + i64(column)
        for i in range(COUNT):
            there = line + i * LINES < lines.count
            for e in range(0, FOUR, vec.vector):
                vec.load(values, FOUR * i + e, lines.data, index + e, there & (column + e < columns), 0)
            index += LINES * lines.step

    @verb
    def _start(at):
        """Return where this thread stores its first four numbers."""
        tid = u32(cuda.threadIdx.x)
        line, column = tid // u32(LINE), tid % u32(LINE) * u32(FOUR)
        lies = line if as_words else u32(paired_line(line))
        plain = column // u32(PITCH) * u32(box.size) + lies * u32(PITCH) + column % u32(PITCH)
        return i32(at + i32(swizzled(plain, SHIFT, FLIPS)))

    @verb
    def _place_of(place, i):
        """Return where it stores four number i. The steps between lines are powers of two, so places add up too."""
        further = (i * LINES if as_words else paired_line(i * LINES)) * PITCH
        return i32((place ^ (further >> SHIFT & FLIPS)) + further)

    @verb
    def _put_words(smem, floats, at, values):
        place = _start(at)
        for i in range(COUNT):
            for pair in range(2):
                e = FOUR * i + 2 * pair
                st_shared_b32(smem, _place_of(place, i) + 2 * pair, pack_bf16x2(values[e], values[e + 1]))

    @verb
    def _put_tf32(smem, floats, at, values):
        place = _start(i32(at // 2))
        for i in range(COUNT):
            for e in range(FOUR):
                st_shared_b32(floats, _place_of(place, i) + e, bits_of_f32(rounded(values[FOUR * i + e])))

    b_side, a_side, IN_BOX, A_BOX = (
        fragments(box, PITCH, left=False),
        fragments(a, ROWS, left=True),
        a.depth // STEP,
        a.size,
    )
    multiply, TILES = (_by_words if as_words else _by_tf32)(box), PITCH // 8

    def step_of(n: int) -> Callable[..., None]:
        def box_of(number: int) -> Callable[..., None]:
            @verb
            def add_box(sums, left, smem, b_place):
                multiply(sums, 4 * TILES * number, left, smem, i32(b_place + number * box.size), n)

            return add_box

        of_boxes = one_after_another([box_of(number) for number in range(boxes)])

        @verb
        def add_step(sums, smem, place, factor):
            (a_place, first), (b_smem, b_place) = place, factor
            left = a_side.make()
            step = i32(u32(first) // u32(STEP) + u32(n))
            number = i32(u32(step) // u32(IN_BOX))
            a_side.read(left, 0, smem, i32(a_place + number * A_BOX), i32(step - number * IN_BOX))
            of_boxes(sums, left, b_smem, b_place)

        return add_step

    add_all = one_after_another([step_of(n) for n in range(lines // STEP)])

    @verb
    def _add_words(sums, smem, floats, place, at):
        add_all(sums, smem, place, (smem, i32(at + b_side.start(0))))

    @verb
    def _add_tf32(sums, smem, floats, place, at):
        add_all(sums, smem, place, (floats, i32(at // 2 + b_side.start(0))))

    return members(
        locals(),
        numbers=FOUR * COUNT,  # that a thread loads
        # (smem, floats, at, values): to element `at` of smem; floats: the same as float32
        put=_put_words if as_words else _put_tf32,
        # (sums, smem, floats, (a_place, first), at): by all lanes; first: A's column for line 0, a multiple of 16
        add=_add_words if as_words else _add_tf32,
    )


def _by_words(box: FactorSlice) -> Callable[..., None]:
    """Return the verb (sums, first, left, smem, b_place, step): 16 steps of a box; left: words of 16 bits."""
    mma, b_side, TILES = mma_m16n8k16(MMA_TYPES["bfloat16"]), fragments(box, box.rows, left=False), box.rows // 8

    @verb
    def multiply(sums, first, left, smem, b_place, step):
        right = b_side.make()
        b_side.read(right, 0, smem, b_place, step)
        for j in range(TILES):
            mma(sums, first + 4 * j, left, 0, right, 2 * j)

    return multiply


def _by_tf32(box: FactorSlice) -> Callable[..., None]:
    """Return the same verb as two products of tf32."""
    mma, b_side, TILES = mma_m16n8k8_tf32, fragments(box, box.rows, left=False), box.rows // 8

    @verb
    def multiply(sums, first, left, smem, b_place, step):
        own, right = cuda.local.array(2 * A_WORDS, u32), b_side.make()
        for word in range(A_WORDS):
            even, odd = unpack_f16x2(left[word])
            at = A_WORDS * (word // 2) + word % 2
            own[at], own[at + 2] = bits_of_f32(even), bits_of_f32(odd)
        for half in range(2):
            b_side.read(right, half, smem, b_place, 2 * step + half)
            for j in range(TILES):
                mma(sums, first + 4 * j, own, A_WORDS * half, right, 2 * TILES * half + 2 * j)

    return multiply
