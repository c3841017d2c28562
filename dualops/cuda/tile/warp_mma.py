"""Products of a warp by mma.sync: slices of 16-bit factors in swizzled shared memory, their fragments, and sums.

    slice = FactorSlice("depth", BLOCK_M, BLOCK_K)      what lies where
    a = fragments(slice, 64, left=True)                 how a warp reads 64 rows of it, 16 steps of the sum at a time
    products = warp_products("bfloat16", 64, 64)        acc [64, 64] += a [64, 16] @ b [16, 64]

Lines of a slice are what is contiguous in global memory: of `along` "depth" a row of a, or a column of b, by all of
the slice's steps; of "row" one step, by all rows. Either becomes fragments as it lies, as `ldmatrix` can transpose.
Eight lines at the same place, which a matrix of `ldmatrix` is, meet no bank twice (`swizzle`), nor do the copies that
fill neighbouring places. Which lane holds which element: `fragment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ..backend import Namespace, cuda, f32, i32, u32, verb
from ..ptx.ldmatrix import ldmatrix
from ..ptx.mma import mma_m16n8k16
from . import swizzle

STEP = 16  # steps of the sum that a product multiplies
MMA_TYPES = {"bfloat16": "bf16", "float16": "f16"}
ITEMSIZE = 2


@dataclass(frozen=True)
class FactorSlice:
    """`depth` steps of the sum, and of each `rows` rows of a (or columns of b), in swizzled shared memory.

    Places count elements from the slice's first, which is at a multiple of 128 bytes. Raises ValueError for sizes that
    no swizzle has.
    """

    along: str  # "depth" or "row": what is contiguous
    rows: int
    depth: int

    def __post_init__(self) -> None:
        if self.along not in ("depth", "row"):
            raise ValueError(f"along is {self.along!r}, expected 'depth' or 'row'")
        if self.line % self.pitch or 2 * self.pitch not in (64, 128) or self.depth % (2 * STEP) or self.rows % STEP:
            told = f"{self.rows} rows by {self.depth} steps along {self.along}"
            raise ValueError(
                f"a slice of {told}, expected lines of 32 or of multiples of 64, and pairs of {STEP} steps"
            )

    @cached_property
    def line(self) -> int:
        """Elements of a line."""
        return self.depth if self.along == "depth" else self.rows

    @cached_property
    def lines(self) -> int:
        return self.rows if self.along == "depth" else self.depth

    @cached_property
    def pitch(self) -> int:
        """Elements of a line that lie in one box, and from a line of a box to the next."""
        return min(self.line, 64)

    @cached_property
    def box(self) -> int:
        """Elements from a box to the next."""
        return self.lines * self.pitch

    @cached_property
    def size(self) -> int:
        return self.rows * self.depth

    def place(self, line: int, column: int) -> int:
        """Where an element lies; plain arithmetic, for tests."""
        return swizzle.place(line, column, self.lines, ITEMSIZE, ITEMSIZE * self.pitch) // ITEMSIZE


class Fragments(Namespace):
    """How a warp reads its rows of a slice. frag: a local array with room for two steps, `half` says which of them."""

    words: int  # of a thread, for a step
    make: Callable[..., Any]  # () -> frag
    start: Callable[..., Any]  # (row) -> where this lane begins to read, for rows from `row` on
    read: Callable[..., None]  # (frag, half, smem, at, step): step number `step` of the slice; at: its place + `start`


@cache
def fragments(factor: FactorSlice, rows: int, left: bool) -> Fragments:
    """The verbs for so many rows of a (left), or columns of b. Raises ValueError for rows that are no part of a box."""
    MATRICES, SIZE = rows // 16, rows // 16 * 4
    ALONG_DEPTH, PITCH, BOX = factor.along == "depth", factor.pitch, factor.box
    TOGETHER = min(rows, PITCH) // 16  # of along "row": matrices that a box has of them
    if rows % 16 or (not ALONG_DEPTH and (rows % PITCH and PITCH % rows)):
        raise ValueError(f"{rows} rows a warp, expected a multiple of 16 that fills boxes of {PITCH} or parts them")
    load = ldmatrix(4, not ALONG_DEPTH)

    @verb
    def make():
        return cuda.local.array(2 * SIZE, u32)

    @verb
    def start(row):
        # a product takes four matrices of 8 rows by 8 steps: of a first those of the same steps, of b of the same rows
        lane = u32(cuda.threadIdx.x) % u32(32)
        first, second = lane // u32(8) % u32(2), lane // u32(16)
        row_half, depth_half = (first, second) if left else (second, first)
        within = lane % u32(8)
        if ALONG_DEPTH:
            line = u32(row) + u32(8) * row_half + within
            column = u32(8) * depth_half
        else:
            line = u32(8) * depth_half + within
            column = u32(row) + u32(8) * row_half
        plain = (column // u32(PITCH)) * u32(BOX) + line * u32(PITCH) + column % u32(PITCH)
        return i32(swizzled(plain, PITCH))

    @verb
    def read_along_depth(frag, half, smem, at, step):
        for i in range(MATRICES):
            load(frag, half * SIZE + 4 * i, smem, i32((at ^ (STEP * step)) + i * (16 * PITCH)))

    @verb
    def read_along_row(frag, half, smem, at, step):
        for i in range(MATRICES):
            load(
                frag,
                half * SIZE + 4 * i,
                smem,
                i32((at ^ (16 * (i % TOGETHER))) + (i // TOGETHER * BOX + step * (STEP * PITCH))),
            )

    read = read_along_depth if ALONG_DEPTH else read_along_row
    return Fragments(words=SIZE, make=make, start=start, read=read)


def swizzled(place: Any, pitch: int) -> Any:
    """`swizzle.swizzled` of a place in elements of 16 bits, in a box whose lines are `pitch` of them."""
    return place ^ (place >> u32(3) & u32(pitch - 8))


class WarpProducts(Namespace):
    """The sums of a warp, [rows, columns]: products of 16 rows and 8 columns, row after row of them."""

    make: Callable[..., Any]  # () -> acc, a local array of zeros
    multiply: Callable[..., None]  # (acc, a_frag, b_frag, half): acc += a @ b, of a step


@cache
def warp_products(dtype: str, rows: int, columns: int) -> WarpProducts:
    """The verbs for factors of "bfloat16" or "float16", sums in float32."""
    mma, M_TILES, N_TILES = mma_m16n8k16(MMA_TYPES[dtype]), rows // 16, columns // 8
    ZERO = f32(0)

    @verb
    def make():
        acc = cuda.local.array(4 * M_TILES * N_TILES, f32)
        for e in range(len(acc)):
            acc[e] = ZERO
        return acc

    @verb
    def multiply(acc, a_frag, b_frag, half):
        for i in range(M_TILES):
            for j in range(N_TILES):
                mma(acc, 4 * (i * N_TILES + j), a_frag, 4 * (half * M_TILES + i), b_frag, 2 * (half * N_TILES + j))

    return WarpProducts(make=make, multiply=multiply)
