"""Products of a warp with one factor of float32 numbers and one of 16 bits.

    pv = strip_of_floats("float16", v_box, boxes)                   acc [16, n] += P @ V, P as sums lie in registers
    kv = strip_of_weighted("bfloat16", k_box, v_box, boxes, True)   acc [16, n] += (weights * K).T @ V

    tile = float_tile("bfloat16", a_boxes, LINES, COLUMNS, threads, aligned)
    tile.fetch(values, lines, columns)                     start the loads to registers, overlapped with products
    tile.put(smem, floats, at, values)                     round the numbers and store them to shared memory
    tile.add(sums, smem, floats, (a_place, first), at)     sums [16, COLUMNS] += A [16, LINES] @ it

bfloat16 has the range of float32. With a factor of bfloat16 the float32 numbers are rounded to it, or split exactly
into three parts (`split_bf16x3`). float16 has a smaller range. Then float32 numbers are rounded to tf32's 11 bits, or
split into two parts, which keep nearly all bits. tf32 has float32's range and contains every float16.

For each eight columns of 16 bits a lane has 2 * t and 2 * t + 1, but tf32's left factor wants t and t + 4. A word of a
right factor in 16 bits holds the lines 2 * t and 2 * t + 1. The steps of a sum may have any order, so both fit. A right
factor in float32 stores its lines in that order (`paired_line`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...compiler.backend import Members, Noun, cuda, f32, i32, i64, kept_noun, members, noun, u32, verb
from ...ptx.arithmetic import bits_of_f32
from ...ptx.convert import pack_bf16x2, unpack_bf16x2, unpack_f16x2
from ...ptx.memory import ld_shared_v2_f32, st_shared_b32
from ...ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from ...tile.split_bf16x3 import PARTS, packed_parts, parts_of
from ...tile.storage import access
from ...tile.strips import A_WORDS, ROWS
from ...tile.tf32 import rounded, rounded_word, words_of_parts
from ...tile.unrolled import local_array, unrolled, zeros
from ...tile.warp_mma import FactorSlice, fragments, swizzled

UNPACKED = {"bfloat16": unpack_bf16x2, "float16": unpack_f16x2}
STEP = 16  # steps of a sum whose words a lane reads at once: two products
NUMBERS = 8  # of a lane's left factor, for this many steps


@verb
def paired_line(line):
    """Return the place of a line, such that lines 2 * t and 2 * t + 1 of each eight are at t and t + 4."""
    return line // 8 * 8 + line % 2 * 4 + line % 8 // 2


@verb
def place_of(word):
    """Return which of a lane's numbers is this word: rows r and r + 8 of column t, then of t + 4. The numbers have the
    order of sums.
    """
    return word // A_WORDS * A_WORDS + word % 2 * 2 + word % A_WORDS // 2


def _products(dtype: str, b: FactorSlice, exact: bool) -> Noun:
    """Return the noun of products of 16 steps of a sum, with a left factor in float32. b: a box of the right factor."""
    return _in_thirds(b, exact) if dtype == "bfloat16" else _in_tf32(b, exact)


@noun
def _in_thirds(b: FactorSlice, exact: bool) -> Members:
    """By bfloat16. Parts are in the order smallest first."""
    mma, b_side, TILES = mma_m16n8k16("bf16"), fragments(b, b.rows, left=False), b.rows // 8
    COUNT = PARTS if exact else 1
    WORDS = A_WORDS * COUNT  # of a lane

    @verb
    def put(left, at, values, first):
        """Write NUMBERS of values as words of the left factor, left[at:]."""
        for word in range(A_WORDS):
            one, other = values[first + 2 * word], values[first + 2 * word + 1]
            if exact:
                (upper, middle, lower), (next_upper, next_middle, next_lower) = parts_of(one), parts_of(other)
                left[at + word] = packed_parts(lower, next_lower)
                left[at + A_WORDS + word] = packed_parts(middle, next_middle)
                left[at + 2 * A_WORDS + word] = packed_parts(upper, next_upper)
            else:
                left[at + word] = pack_bf16x2(one, other)

    @verb
    def multiply(sums, first, left, at, smem, b_place, step):
        """Add the products of a box to sums[first:]."""
        right = b_side.make()
        b_side.read(right, 0, smem, b_place, step)
        for part in range(COUNT):
            for j in range(TILES):
                mma(sums, first + 4 * j, left, at + A_WORDS * part, right, 2 * j)

    return locals()


@noun
def _in_tf32(b: FactorSlice, exact: bool) -> Members:
    """By tf32, two products of 8 steps each. Words are the upper parts, then the lower parts, which are multiplied
    first. The verbs are those of `_in_thirds`.
    """
    mma, b_side = mma_m16n8k8_tf32, fragments(b, b.rows, left=False)
    WORDS = 2 * NUMBERS if exact else NUMBERS

    @verb
    def put(left, at, values, first):
        for word in range(NUMBERS):
            value = values[first + place_of(word)]
            if exact:
                left[at + word], left[at + NUMBERS + word] = words_of_parts(value)
            else:
                left[at + word] = rounded_word(bits_of_f32(value))

    @verb
    def multiply(sums, first, left, at, smem, b_place, step):
        packed, right = b_side.make(), cuda.local.array(2, u32)
        b_side.read(packed, 0, smem, b_place, step)
        for word in range(b_side.words):
            j, half = word // 2, word % 2
            even, odd = unpack_f16x2(packed[word])
            right[0], right[1] = bits_of_f32(even), bits_of_f32(odd)
            if exact:
                mma(sums, first + 4 * j, left, at + (NUMBERS + A_WORDS * half), right, 0)
            mma(sums, first + 4 * j, left, at + A_WORDS * half, right, 0)

    return locals()


@kept_noun
def strip_of_floats(dtype: str, b: FactorSlice, boxes: int) -> Members:
    """As `strips.strip_ab`, but the left factor keeps the range of float32. b: a box of the right factor."""
    STEPS, SIZE, BOX, OF_BOX = b.depth // STEP, b.rows // 2 * boxes, b.size, b.rows // 2
    b_side, one = fragments(b, b.rows, left=False), _products(dtype, b, False)
    WORDS = one.WORDS

    @verb
    def put(a, values):
        """Make A of numbers in the layout of sums."""
        for step in range(STEPS):
            one.put(a, WORDS * step, values, NUMBERS * step)

    @unrolled([(step, box) for step in range(STEPS) for box in range(boxes)])
    def _add(sums, a, smem, b_place, step, box):
        one.multiply(sums, OF_BOX * box, a, WORDS * step, smem, i32(b_place + box * BOX), step)

    @verb
    def add(sums, a, smem, b_at):
        """Add A @ B to sums."""
        _add(sums, a, smem, i32(b_at + b_side.start(0)))

    return members(
        locals(),
        size=SIZE,  # sums of a thread
        fragment=zeros(SIZE),  # () -> sums
        left=local_array(WORDS * STEPS, u32),  # () -> A
    )


@cache
def rounding_left(dtype: str) -> Callable[..., Any]:
    """Return the verb (a, b) -> the rounding errors of `strip_of_floats` for two neighbours of A; 0 if not finite."""
    ZERO = f32(0)

    @verb
    def rest(less):
        return less if less == less else ZERO

    @verb
    def of_words(a, b):
        low, high = unpack_bf16x2(pack_bf16x2(a, b))
        return rest(a - low), rest(b - high)

    @verb
    def of_tf32(a, b):
        return rest(a - rounded(a)), rest(b - rounded(b))

    return of_words if dtype == "bfloat16" else of_tf32


@kept_noun
def strip_of_weighted(dtype: str, x: FactorSlice, y: FactorSlice, boxes: int, exact: bool) -> Members:
    """sums [16, columns] += (weights * X).T @ Y. Lines of X and Y are steps of the sum.

    x: the box of X; y: one of the `boxes` boxes of Y. exact: a number of X times its weight is split into parts that
    keep all digits of float32, or nearly all; otherwise it is rounded.
    """
    x_side, y_side = fragments(x, ROWS, left=True), fragments(y, y.rows, left=False)
    unpack, one = UNPACKED[dtype], _products(dtype, y, exact)
    STEPS, SIZE, BOX, OF_BOX = y.depth // STEP, y.rows // 2 * boxes, y.size, y.rows // 2

    @verb
    def place(column):
        """Return where this lane reads the 16 columns of X from `column` on."""
        return x_side.start(column)

    @unrolled(range(boxes))
    def _add_boxes(sums, left, smem, y_place, step, box):
        one.multiply(sums, OF_BOX * box, left, 0, smem, i32(y_place + box * BOX), step)

    @unrolled(range(STEPS))
    def _add(sums, smem, x_place, y_place, weights, step):
        floats, weights_at = weights
        words, values, left = x_side.make(), cuda.local.array(NUMBERS, f32), cuda.local.array(one.WORDS, u32)
        x_side.read(words, 0, smem, x_place, step)
        mine = i32(weights_at + 2 * (cuda.threadIdx.x % 4))
        for half in range(2):  # eight steps each
            here, next_one = ld_shared_v2_f32(floats, i32(mine + (STEP * step + 8 * half)))
            for row in range(2):
                word = 2 * half + row
                even, odd = unpack(words[word])
                values[2 * word], values[2 * word + 1] = even * here, odd * next_one
        one.put(left, 0, values, 0)
        _add_boxes(sums, left, smem, y_place, step)

    @verb
    def add(sums, smem, places, weights):
        """Add the product to sums. weights: float32 in shared memory, one for each line."""
        _add(sums, smem, places[0], i32(places[1] + y_side.start(0)), weights)

    return members(
        locals(),
        size=SIZE,  # sums of a thread
        fragment=zeros(SIZE),  # () -> sums
    )


FOUR = 4  # neighbours that a thread loads


@kept_noun
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
    def put(smem, floats, at, values):
        """Store the numbers to element `at` of smem. floats: the same as float32."""
        place = _start(at if as_words else i32(at // 2))
        for i in range(COUNT):
            for e in range(0, FOUR, 2):
                one, other, there = values[FOUR * i + e], values[FOUR * i + e + 1], _place_of(place, i) + e
                if as_words:
                    st_shared_b32(smem, there, pack_bf16x2(one, other))
                else:
                    st_shared_b32(floats, there, bits_of_f32(rounded(one)))
                    st_shared_b32(floats, there + 1, bits_of_f32(rounded(other)))

    b_side, a_side = fragments(box, PITCH, left=False), fragments(a, ROWS, left=True)
    IN_BOX, A_BOX, TILES = a.depth // STEP, a.size, PITCH // 8
    multiply, B_BOX = _in_thirds(box, False).multiply if as_words else _by_tf32(box), box.size

    @unrolled(range(boxes))
    def _add_boxes(sums, left, smem, b_place, step, box):
        multiply(sums, 4 * TILES * box, left, 0, smem, i32(b_place + box * B_BOX), step)

    @unrolled(range(lines // STEP))
    def _add(sums, smem, a_place, first, b_smem, b_place, n):
        left = a_side.make()
        step = i32(u32(first) // u32(STEP) + u32(n))
        number = i32(u32(step) // u32(IN_BOX))
        a_side.read(left, 0, smem, i32(a_place + number * A_BOX), i32(step - number * IN_BOX))
        _add_boxes(sums, left, b_smem, b_place, n)

    @verb
    def add(sums, smem, floats, place, at):
        """Add the product to sums; by all lanes. place: A's place, and its column for line 0, a multiple of 16."""
        if as_words:
            _add(sums, smem, place[0], place[1], smem, i32(at + b_side.start(0)))
        else:
            _add(sums, smem, place[0], place[1], floats, i32(at // 2 + b_side.start(0)))

    return members(
        locals(),
        numbers=FOUR * COUNT,  # that a thread loads
        values=local_array(FOUR * COUNT, f32),  # () -> values
    )


def _by_tf32(box: FactorSlice) -> Callable[..., None]:
    """Return the verb `_in_thirds.multiply` for a box of tf32, with words of 16 bits on the left: two products."""
    mma, b_side, TILES = mma_m16n8k8_tf32, fragments(box, box.rows, left=False), box.rows // 8

    @verb
    def multiply(sums, first, left, at, smem, b_place, step):
        own, right = cuda.local.array(2 * A_WORDS, u32), b_side.make()
        for word in range(A_WORDS):
            even, odd = unpack_f16x2(left[at + word])
            to = A_WORDS * (word // 2) + word % 2
            own[to], own[to + 2] = bits_of_f32(even), bits_of_f32(odd)
        for half in range(2):
            b_side.read(right, half, smem, b_place, 2 * step + half)
            for j in range(TILES):
                mma(sums, first + 4 * j, own, A_WORDS * half, right, 2 * TILES * half + 2 * j)

    return multiply
