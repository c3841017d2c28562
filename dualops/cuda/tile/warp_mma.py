"""Products of a warp by mma.sync: slices of factors in swizzled shared memory, their fragments, and sums.

    slice = FactorSlice("depth", BLOCK_M, BLOCK_K)      the layout of a slice
    a = fragments(slice, 64, left=True)                 how a warp reads 64 rows of it, 16 steps of the sum at a time
    products = warp_products("bfloat16", 64, 64)        acc [64, 64] += a [64, 16] @ b [16, 64]

Factors have 16 bits, 16 steps at a time, or are float32, multiplied as tf32, 8 steps at a time: 32 bytes of a row
either way. A line of a slice is contiguous in global memory. With `along` "depth", a line is a row of a, or a column of
b, with all steps of the slice. With "row", a line is one step, with all rows. `ldmatrix` can transpose 16 bits, so it
reads both. For float32 along "row", a lane loads the words one by one.

A matrix of `ldmatrix` is eight lines at the same place. Reading it has no bank conflicts (`swizzle`), nor have copies
to neighbouring places. `fragment` says which lane holds which element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..compiler.backend import Members, Namespace, cuda, f32, i32, kept_noun, members, u32, verb
from ..ptx.arithmetic import f32_of_bits
from ..ptx.matrices import ldmatrix
from ..ptx.memory import ld_shared_b32
from ..ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from .tf32 import rounded_word, words_of_parts
from .unrolled import local_array, zeros

STEP_BYTES = 32  # bytes of a row per product
LINE_BYTES = 128  # most bytes of a box's line
MATRIX_BYTES = 16  # bytes of a line of a matrix of `ldmatrix`
MMA_TYPES = {"bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class FactorSlice:
    """`rows` rows of a (or columns of b) with `depth` steps of the sum each, in swizzled shared memory.

    Places are in elements from the slice's first, which is at a multiple of 128 bytes. Raises ValueError for sizes that
    no swizzle supports.
    """

    along: str  # "depth" or "row": the contiguous direction
    rows: int
    depth: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.along not in ("depth", "row"):
            raise ValueError(f"along is {self.along!r}, expected 'depth' or 'row'")
        whole = self.itemsize * self.pitch in ((64, 128) if self.by_matrices else (128,))
        if self.line % self.pitch or not whole or self.depth % (2 * self.step) or self.rows % 16:
            size = f"{self.rows} rows by {self.depth} steps along {self.along}"
            wanted = (
                f"{32 * self.step // 16} or of multiples of {4 * self.step}" if self.by_matrices else "multiples of 32"
            )
            raise ValueError(f"a slice of {size}, expected lines of {wanted}, and pairs of {self.step} steps")

    @cached_property
    def step(self) -> int:
        """Return the steps of the sum per product."""
        return STEP_BYTES // self.itemsize

    @cached_property
    def line(self) -> int:
        """Return the elements of a line."""
        return self.depth if self.along == "depth" else self.rows

    @cached_property
    def lines(self) -> int:
        return self.rows if self.along == "depth" else self.depth

    @cached_property
    def pitch(self) -> int:
        """Return the elements of a line in one box, which is also the distance between lines of a box."""
        return min(self.line, LINE_BYTES // self.itemsize)

    @cached_property
    def box(self) -> int:
        """Return the elements from a box to the next."""
        return self.lines * self.pitch

    @cached_property
    def size(self) -> int:
        return self.rows * self.depth

    @cached_property
    def matrix(self) -> int:
        """Return the elements of a matrix's line, which the swizzle moves together."""
        return MATRIX_BYTES // self.itemsize

    @cached_property
    def shift(self) -> int:
        """Bits by which the line number is shifted to give the swizzle of an address, within the bits of `flips`.

        This matches the swizzle of box copies. But float32 along "row" is read without `ldmatrix`: four lines at a
        time, 8 numbers of each.
        """
        return 3 if self.by_matrices else 2

    @cached_property
    def flips(self) -> int:
        return self.pitch - self.matrix if self.by_matrices else 24

    @cached_property
    def by_matrices(self) -> bool:
        """Return whether fragments are read by `ldmatrix`."""
        return self.itemsize == 2 or self.along == "depth"

    def place(self, line: int, column: int) -> int:
        """Return the place of an element; plain arithmetic, for tests."""
        box, column = divmod(column, self.pitch)
        return int(swizzled(box * self.box + line * self.pitch + column, self.shift, self.flips))


class Fragments(Namespace):
    """The verbs by which a warp reads its rows of a slice. frag: a local array for two steps; `half` is one of them."""

    words: int  # per thread and step
    make: Callable[..., Any]  # () -> frag
    start: Callable[..., Any]  # (row) -> the place at which this lane begins to read, for rows from `row` on
    read: Callable[..., None]  # (frag, half, smem, at, step): step number `step` of the slice; at: its place + `start`


@cache
def fragments(factor: FactorSlice, rows: int, left: bool) -> Fragments:
    """The verbs for `rows` rows of a (left), or columns of b. Raises ValueError for rows that don't fit in boxes."""
    MATRICES, SIZE, make = rows // 16, rows // 16 * 4, local_array(rows // 16 * 8, u32)
    ALONG_DEPTH, PITCH, BOX, STEP = factor.along == "depth", factor.pitch, factor.box, factor.step
    SHIFT, FLIPS, MATRIX = factor.shift, factor.flips, u32(factor.matrix)
    TOGETHER = min(rows, PITCH) // 16  # along "row": matrices per box
    if rows % 16 or (not ALONG_DEPTH and (rows % PITCH and PITCH % rows)):
        raise ValueError(f"{rows} rows per warp, expected a multiple of 16 that fills boxes of {PITCH} or parts them")
    load = ldmatrix(4, not ALONG_DEPTH and factor.by_matrices)

    @verb
    def start(row):
        # a product has four matrices of 8 rows by 8 steps; in a those with the same steps come first, in b those of the
        # same rows
        lane = u32(cuda.threadIdx.x) % u32(32)
        first, second = lane // u32(8) % u32(2), lane // u32(16)
        row_half, depth_half = (first, second) if left else (second, first)
        within = lane % u32(8)
        if ALONG_DEPTH:
            line = u32(row) + u32(8) * row_half + within
            column = MATRIX * depth_half
        else:
            line = u32(8) * depth_half + within
            column = u32(row) + u32(8) * row_half
        plain = (column // u32(PITCH)) * u32(BOX) + line * u32(PITCH) + column % u32(PITCH)
        return i32(swizzled(plain, SHIFT, FLIPS))

    @verb
    def start_of_words(row):
        lane = u32(cuda.threadIdx.x) % u32(32)
        line, column = lane % u32(4), u32(row) + lane // u32(4)
        plain = (column // u32(PITCH)) * u32(BOX) + line * u32(PITCH) + column % u32(PITCH)
        return i32(swizzled(plain, SHIFT, FLIPS))

    @verb
    def read_along_depth(frag, half, smem, at, step):
        for i in range(MATRICES):
            load(frag, half * SIZE + 4 * i, smem, i32((at ^ (STEP * step)) + i * (16 * PITCH)))

    @verb
    def read_along_row(frag, half, smem, at, step):
        for i in range(MATRICES):
            place = (at ^ (16 * (i % TOGETHER))) + (i // TOGETHER * BOX + step * (STEP * PITCH))
            load(frag, half * SIZE + 4 * i, smem, i32(place))

    @verb
    def read_words(frag, half, smem, at, step):
        for i in range(MATRICES):
            for word in range(4):
                row_half, depth_half = (word % 2, word // 2) if left else (word // 2, word % 2)
                further = i // TOGETHER * BOX + (step * STEP + 4 * depth_half) * PITCH
                place = (at ^ (16 * (i % TOGETHER) + 8 * row_half)) + further
                frag[half * SIZE + 4 * i + word] = ld_shared_b32(smem, i32(place))

    if not factor.by_matrices:
        return Fragments(words=SIZE, make=make, start=start_of_words, read=read_words)
    read = read_along_depth if ALONG_DEPTH else read_along_row
    return Fragments.from_locals(locals(), words=SIZE)


def swizzled(place: Any, shift: int, flips: int) -> Any:
    """Return the swizzled place of an element, see `FactorSlice.shift`."""
    return place ^ (place >> u32(shift) & u32(flips))


@kept_noun
def warp_products(dtype: str, rows: int, columns: int, parts: bool = False) -> Members:
    """The verbs for a warp's sums [rows, columns], in float32: products of 16 rows and 8 columns, row by row.

    Factors are "bfloat16" or "float16"; or "float32", multiplied as tf32. parts: float32 factors are split into two
    parts of tf32, and the product of the lower parts is left out.
    """
    mma = mma_m16n8k8_tf32 if dtype == "float32" else mma_m16n8k16(MMA_TYPES[dtype])
    M_TILES, N_TILES = rows // 16, columns // 8
    A_WORDS, B_WORDS = 4 * M_TILES, 2 * N_TILES  # per step
    ZERO = f32(0)

    @verb
    def add_to(totals, acc):
        """Add acc to totals, and make it 0."""
        for e in range(len(acc)):
            totals[e] += acc[e]
            acc[e] = ZERO

    @verb
    def _products(acc, a_frag, a_at, b_frag, b_at):
        for i in range(M_TILES):
            for j in range(N_TILES):
                mma(acc, 4 * (i * N_TILES + j), a_frag, a_at + 4 * i, b_frag, b_at + 2 * j)

    @verb
    def multiply(acc, a_frag, b_frag, half):
        _products(acc, a_frag, half * A_WORDS, b_frag, half * B_WORDS)

    @verb
    def _multiply_rounded(acc, a_frag, b_frag, half):
        a_at, b_at = half * A_WORDS, half * B_WORDS
        for word in range(A_WORDS):
            a_frag[a_at + word] = rounded_word(a_frag[a_at + word])
        for word in range(B_WORDS):
            b_frag[b_at + word] = rounded_word(b_frag[b_at + word])
        _products(acc, a_frag, a_at, b_frag, b_at)

    @verb
    def _multiply_parts(acc, a_frag, b_frag, half):
        a_lower, b_lower = cuda.local.array(A_WORDS, u32), cuda.local.array(B_WORDS, u32)
        a_at, b_at = half * A_WORDS, half * B_WORDS
        for word in range(A_WORDS):
            a_frag[a_at + word], a_lower[word] = words_of_parts(f32_of_bits(a_frag[a_at + word]))
        for word in range(B_WORDS):
            b_frag[b_at + word], b_lower[word] = words_of_parts(f32_of_bits(b_frag[b_at + word]))
        _products(acc, a_lower, 0, b_frag, b_at)
        _products(acc, a_frag, a_at, b_lower, 0)
        _products(acc, a_frag, a_at, b_frag, b_at)

    if dtype == "float32":
        multiply = _multiply_parts if parts else _multiply_rounded
    return members(
        locals(),
        make=zeros(4 * M_TILES * N_TILES),  # () -> acc
        multiply=multiply,  # (acc, a_frag, b_frag, half): acc += a @ b of one step; may change the fragments
    )
