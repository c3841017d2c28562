"""How the sums of a warp's products come from its registers into rows, of which threads have eight columns.

The warp puts 16 rows of its sums into shared memory and takes them back row by row. Of a thread's eight columns the
first four lie in the one half of the row, the others in the other: so rows of 64 are written and read without meeting a
bank twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from ..compiler.backend import Members, cuda, f32, i32, members, noun, verb
from ..ptx.memory import st_shared_v2_f32
from ..ptx.warp import bar_warp_sync
from .numbers import numbers
from .rows import FULL_WARP

ROWS = 16  # of a product
COLUMNS = 8  # of a thread
PAD = 8  # numbers between rows


@dataclass(frozen=True)
class WarpRowsLayout:
    """Where the numbers of ROWS rows of `width` lie, a warp behind the other."""

    width: int

    @cached_property
    def row(self) -> int:
        """Numbers from a row to the next."""
        return self.width + PAD

    @cached_property
    def half(self) -> int:
        """Numbers from the first half of a row to the second."""
        return self.row // 2

    @cached_property
    def size(self) -> int:
        """Numbers from a warp's to the next one's."""
        return ROWS * self.row

    def place(self, row: int, column: int) -> int:
        """Plain arithmetic, for tests."""
        return row * self.row + column % 8 // 4 * self.half + column // 8 * 4 + column % 4


@cache
@noun
def warp_rows(rows: int, width: int, widest: int = 0) -> Members:
    """The verbs of a warp. smem: shared memory as float32.

    The sums [rows, width] have the layout of `warp_mma.warp_products`. widest: columns of the widest row for which a
    warp's shared memory has room, so that rows of two widths can use it one after the other.
    """
    layout, num = WarpRowsLayout(width), numbers(f32)
    SIZE = WarpRowsLayout(max(width, widest)).size
    THREADS, M_TILES, N_TILES = width // COLUMNS, rows // ROWS, width // 8  # threads that share a row

    @verb
    def row():
        """Return the thread's first row of the 16."""
        return i32(cuda.threadIdx.x % 32 // THREADS)

    @verb
    def column():
        """Return the first of the thread's columns."""
        return i32(cuda.threadIdx.x % THREADS * COLUMNS)

    @verb
    def put(smem, acc, i):
        """Write the rows from 16 * i on to shared memory, for any i, and wait until all lanes have written."""
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        pair = lane % 4
        at = i32(warp * SIZE + lane // 4 * layout.row + pair // 2 * layout.half + pair % 2 * 2)
        for tile in range(M_TILES):
            if tile == i:  # constants are what registers can be named by
                for j in range(N_TILES):
                    e = 4 * (tile * N_TILES + j)
                    st_shared_v2_f32(smem, i32(at + 4 * j), acc[e], acc[e + 1])
                    st_shared_v2_f32(smem, i32(at + (4 * j + 8 * layout.row)), acc[e + 2], acc[e + 3])
        bar_warp_sync(FULL_WARP)

    @verb
    def take(values, smem, row):
        """Read a thread's columns into a local array."""
        at = i32(cuda.threadIdx.x // 32 * SIZE + row * layout.row + cuda.threadIdx.x % THREADS * 4)
        num.load_four(values, 0, smem, at)
        num.load_four(values, 4, smem, i32(at + layout.half))

    @verb
    def release():
        """Wait until all lanes have taken theirs."""
        bar_warp_sync(FULL_WARP)

    return members(
        locals(),
        columns=COLUMNS,  # of a thread
        apart=32 // THREADS,  # rows from a thread's to its next
    )


@cache
@noun
def warp_output(rows: int, width: int, finish: Callable[..., None]) -> Members:
    """The same sums row by row, which a verb of the operator takes on from there (`epilogue.RowOutput` for a warp).

    For sums [rows, width]. finish(values, results, m, n): COLUMNS numbers of row m, from column n on. Rows from M on
    are left out; columns beyond the result's are the verb's concern.
    """
    lines, M_TILES = warp_rows(rows, width), rows // ROWS

    @verb
    def store(smem, acc, m0, n0, M, results):
        """Store the sums. m0, n0: the warp's first row and column of the result."""
        values = cuda.local.array(COLUMNS, f32)
        n = n0 + lines.column()
        i = i32(0)
        while i < M_TILES:
            lines.put(smem, acc, i)
            row = lines.row()
            while row < ROWS:
                m = m0 + (i * ROWS + row)
                if m < M:
                    lines.take(values, smem, row)
                    finish(values, results, m, n)
                row = i32(row + lines.apart)
            if M_TILES > 1:
                lines.release()
            i = i32(i + 1)

    return locals()
