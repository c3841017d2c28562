"""A thread's part of a state [D, BLOCK_V], and its loads and stores.

Thread (line, lane) of 16 x 16 has the rows line, line + 16, ... and `columns` numbers of each. If states are aligned,
they are neighbours that fill 16 bytes, in each of 16 such groups, so that one access moves them. Otherwise they are the
columns lane, lane + 16, ... The rows of a thread and the order of all sums are the same in both cases.

Tokens' rows, which all threads need, go through shared memory (`fetched`).

A predicated load returns 0 for numbers beyond the state. Numbers beyond a token's row are replaced by 0 after a load of
the row's last number. Neither is a branch: a branch would wait for a load before the next one starts.
"""

from __future__ import annotations

from ...spec.meta import compute_dtype
from ..compiler.backend import Members, cuda, i32, i64, members, noun, u32, verb
from ..launch.arrays import cdiv
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, neighbours
from ..tile.shared import Tile
from ..tile.storage import access, storage


@noun
def state_registers(dtype: str, rows: int, columns: int, *, aligned: bool) -> Members:
    """A thread's part of a state, and of a norm: numbers of its rows, or of its columns. aligned: the rows of states
    are whole 16-byte vectors, and so is `columns`.
    """
    vec, num = access(compute_dtype(dtype), aligned, once=True), numbers(storage(dtype).number)
    near, number, row_of = vec.vector, storage(dtype).number, neighbours(storage(dtype).number, vec.vector)
    norms = max(rows, columns)

    @verb
    def line():
        """Return my line."""
        return i32(u32(cuda.threadIdx.x) // u32(LANES))

    @verb
    def lane():
        """Return my lane."""
        return i32(u32(cuda.threadIdx.x) % u32(LANES))

    @verb
    def row(i):
        """Return the row of my row number i."""
        return line() + LANES * i

    @verb
    def column(c):
        """Return the column of my column number c."""
        return (c // near * LANES + lane()) * near + c % near

    @verb
    def state():
        """Return a local array of rows x columns."""
        return cuda.local.array(rows * columns, number)

    @verb
    def norm():
        """Return a local array for a norm."""
        return cuda.local.array(norms, number)

    @verb
    def of_columns():
        """Return a local array with a number for each column."""
        return cuda.local.array(columns, number)

    @verb
    def _is_there(i, c, e0, D, Dv):
        return (i32(row(i)) < i32(D)) & (i32(e0 + column(c)) < i32(Dv))

    @verb
    def _place(x, at, e0, c):
        """Return the index of column number c in a row that begins at `at`."""
        return at + (e0 + column(c)) * (i64(1) if aligned else x.strides[3])

    @verb
    def load(state, x, b, h, e0, D, Dv):
        """Load the columns from e0 on of x [B, H, D, Dv], zeros beyond it."""
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                keep = _is_there(i, c, e0, D, Dv)
                vec.load(state, i * columns + c, x.data, _place(x, at, e0, c), keep, num.zero)
            at += LANES * x.strides[2]

    @verb
    def store(x, b, h, e0, D, Dv, state):
        """Store to the columns from e0 on of x [B, H, D, Dv], nothing beyond it."""
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                vec.store(x.data, _place(x, at, e0, c), _is_there(i, c, e0, D, Dv), state, i * columns + c)
            at += LANES * x.strides[2]

    @verb
    def take(frag, smem, at):
        """Read my columns of a row of shared memory."""
        for c in range(0, columns, near):
            row_of.load(frag, c, smem, u32(at + column(c)))

    @verb
    def put(smem, at, frag):
        for c in range(0, columns, near):
            if aligned:
                num.store_vector(smem, at + column(c), frag, c)
            else:
                smem[u32(at + column(c))] = frag[c]

    return members(
        locals(),
        rows=rows,
        columns=columns,
        norms=norms,  # numbers of a norm, enough for rows or columns
    )


@noun
def fetched(dtype: str, tile: Tile) -> Members:
    """A thread's numbers of a tile on its way to shared memory. All loads start before the first number is stored. The
    lines of the tile, of an array of this dtype, are next to each other.
    """
    mem, number, width = storage(dtype), storage(dtype).number, tile.width
    num, count = numbers(number), cdiv(tile.rows * width, THREADS)

    @verb
    def line(n):
        """Return the line of number n."""
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) // u32(width))

    @verb
    def column(n):
        """Return the column of number n."""
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) % u32(width))

    @verb
    def frag():
        """Return a local array for the numbers."""
        return cuda.local.array(count, number)

    @verb
    def load(frag, part):
        """Load the numbers; zeros beyond the lines and columns."""
        for n in range(count):
            r, c = min(line(n), i32(part.count - 1)), min(column(n), i32(part.columns - 1))
            value = mem.load(part.data, part.first + r * part.step + c)
            frag[n] = value if (line(n) < part.count) & (column(n) < part.columns) else num.zero

    @verb
    def put(smem, frag, lines):
        """Store this number of lines of the tile to shared memory."""
        for n in range(count):
            if line(n) < lines:
                smem[u32(tile.place(line(n), column(n)))] = frag[n]

    return members(locals(), count=count)
