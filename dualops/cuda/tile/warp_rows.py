"""Rearrange the sums of a warp's products so that each thread has eight columns of a row.

The warp writes 16 rows of its sums to shared memory, and reads them back row by row. The first four of a thread's eight
columns are in one half of the row, the others in the other half. So rows of 64 have no bank conflicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..compiler.backend import Members, cuda, f32, i32, kept_noun, members, verb
from ..ptx.memory import st_shared_v2_f32
from ..ptx.warp import bar_warp_sync
from .numbers import numbers
from .rows import FULL_WARP

ROWS = 16  # rows of a product
COLUMNS = 8  # columns per thread
PAD = 8  # numbers between rows


@dataclass(frozen=True)
class WarpRowsLayout:
    """The layout of ROWS rows of `width` numbers, one warp after the other."""

    width: int

    @cached_property
    def row(self) -> int:
        """Return the numbers from a row to the next."""
        return self.width + PAD

    @cached_property
    def half(self) -> int:
        """Return the numbers from the first half of a row to the second."""
        return self.row // 2

    @cached_property
    def size(self) -> int:
        """Return the numbers from a warp's rows to the next warp's."""
        return ROWS * self.row

    def place(self, row: int, column: int) -> int:
        """Return the index of a number; plain arithmetic, for tests."""
        return row * self.row + column % 8 // 4 * self.half + column // 8 * 4 + column % 4


@kept_noun
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
            if tile == i:  # registers need constant indices
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
        """Wait until all lanes have read their columns."""
        bar_warp_sync(FULL_WARP)

    return members(
        locals(),
        columns=COLUMNS,  # per thread
        apart=32 // THREADS,  # rows from one row of a thread to its next
    )


@kept_noun
def warp_output(rows: int, width: int, finish: Callable[..., None]) -> Members:
    """The verbs that pass the sums [rows, width] row by row to a verb of the operator, as `epilogue.row_output` does.

    finish(values, results, m, n) is called with COLUMNS numbers of row m, from column n on, for rows below M. It must
    skip columns outside of the result.
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
