"""What threads hold of a state [D, BLOCK_V]: who has which numbers of it, and how they come from memory and go there.

Thread (line, lane) of 16 x 16 has the rows line, line + 16, ... and of each of them `columns` numbers: neighbours, as
many as 16 bytes hold, of every 16 such groups where states are aligned, so that one access moves them; else the columns
lane, lane + 16, ... Which rows a thread has does not depend on it, nor in which order anything is added.

Tokens' rows, which all threads need, go through shared memory (`fetched`).

A number of the state that is not there is a zero by the predicate of its load; one of a token's row is a zero in place
of the row's last number. Neither is a branch, in which a load would be waited for before the next one begins.
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
    """A thread's part of a state, and of a norm: numbers of its rows, or of its columns.

    The noun for states of problems of this dtype; aligned: their rows are whole 16-byte vectors, as `columns` is.
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
        return i32(u32(cuda.threadIdx.x) % u32(LANES))

    @verb
    def row(i):
        """Return which row my row number i is."""
        return line() + LANES * i

    @verb
    def column(c):
        """Return which column my column number c is."""
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
        """Of column number c in a row that begins at `at`."""
        return at + (e0 + column(c)) * (i64(1) if aligned else x.strides[3])

    @verb
    def load(state, x, b, h, e0, D, Dv):
        """Load the columns from e0 on of x [B, H, D, Dv]; zeros beyond it."""
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                keep = _is_there(i, c, e0, D, Dv)
                vec.load(state, i * columns + c, x.data, _place(x, at, e0, c), keep, num.zero)
            at += LANES * x.strides[2]

    @verb
    def store(x, b, h, e0, D, Dv, state):
        """Store to the columns from e0 on of x [B, H, D, Dv]; nothing beyond it."""
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
        norms=norms,  # numbers of a norm: as many as rows, or as columns
    )


@noun
def fetched(dtype: str, tile: Tile) -> Members:
    """A thread's numbers of a tile that is on its way to shared memory: loads wait for nothing before they are put.

    The noun for a tile of lines side by side, of an array of this dtype.
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
        """Write so many lines of the tile to shared memory."""
        for n in range(count):
            if line(n) < lines:
                smem[u32(tile.place(line(n), column(n)))] = frag[n]

    return members(locals(), count=count)
