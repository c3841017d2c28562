"""What threads hold of a state [D, BLOCK_V]: who has which numbers of it, and how they come from memory and go there.

Thread (line, lane) of 16 x 16 has the rows line, line + 16, ... and of each of them `columns` numbers: neighbours, as
many as 16 bytes hold, of every 16 such groups where states are aligned, so that one access moves them; else the columns
lane, lane + 16, ... Which rows a thread has does not depend on it, nor in which order anything is added.

Tokens' rows, which all threads need, go through shared memory (`Fetched`).

A number of the state that is not there is a zero by the predicate of its load; one of a token's row is a zero in place
of the row's last number. Neither is a branch, in which a load would be waited for before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...spec.meta import compute_dtype
from ..arrays import cdiv
from ..backend import Namespace, cuda, i32, i64, u32, verb
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, neighbours
from ..tile.shared import Tile
from ..tile.storage import access, storage
from ..views import start


class Held(Namespace):
    """A thread's part of a state, and of a norm: numbers of its rows, or of its columns."""

    rows: int
    columns: int
    norms: int  # numbers of a norm: as many as rows, or as columns
    line: Callable[..., Any]  # () -> mine
    lane: Callable[..., Any]
    row: Callable[..., Any]  # (i) -> which row number i is
    column: Callable[..., Any]  # (c) -> which column number c is
    state: Callable[..., Any]  # () -> a local array of rows x columns
    norm: Callable[..., Any]  # () -> a local array
    of_columns: Callable[..., Any]  # () -> a local array with a number for each column
    load: Callable[..., None]  # (state, x, b, h, e0, D, Dv): of x [B, H, D, Dv] the columns from e0 on; beyond it zeros
    store: Callable[..., None]  # (x, b, h, e0, D, Dv, state): likewise, nothing beyond it
    take: Callable[..., None]  # (frag, smem, at): my columns of a row of shared memory
    put: Callable[..., None]  # (smem, at, frag)


def held_state(dtype: str, rows: int, columns: int, *, aligned: bool) -> Held:
    """The noun for states of problems of this dtype; aligned: their rows are whole 16-byte vectors, as `columns` is."""
    vec, num = access(compute_dtype(dtype), aligned, once=True), numbers(storage(dtype).number)
    near, number, row_of = vec.vector, storage(dtype).number, neighbours(storage(dtype).number, vec.vector)
    norms = max(rows, columns)

    @verb
    def line():
        return i32(u32(cuda.threadIdx.x) // u32(LANES))

    @verb
    def lane():
        return i32(u32(cuda.threadIdx.x) % u32(LANES))

    @verb
    def row(i):
        return line() + LANES * i

    @verb
    def column(c):
        return (c // near * LANES + lane()) * near + c % near

    @verb
    def state():
        return cuda.local.array(rows * columns, number)

    @verb
    def norm():
        return cuda.local.array(norms, number)

    @verb
    def of_columns():
        return cuda.local.array(columns, number)

    @verb
    def is_there(i, c, e0, D, Dv):
        return (i32(row(i)) < i32(D)) & (i32(e0 + column(c)) < i32(Dv))

    @verb
    def place(x, at, e0, c):
        """Of column number c in a row that begins at `at`."""
        return at + (e0 + column(c)) * (i64(1) if aligned else x.strides[3])

    @verb
    def load(state, x, b, h, e0, D, Dv):
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                keep = is_there(i, c, e0, D, Dv)
                vec.load(state, i * columns + c, x.data, place(x, at, e0, c), keep, num.zero)
            at += LANES * x.strides[2]

    @verb
    def store(x, b, h, e0, D, Dv, state):
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                vec.store(x.data, place(x, at, e0, c), is_there(i, c, e0, D, Dv), state, i * columns + c)
            at += LANES * x.strides[2]

    @verb
    def take(frag, smem, at):
        for c in range(0, columns, near):
            row_of.load(frag, c, smem, u32(at + column(c)))

    @verb
    def put(smem, at, frag):
        for c in range(0, columns, near):
            if aligned:
                num.store_vector(smem, at + column(c), frag, c)
            else:
                smem[u32(at + column(c))] = frag[c]

    return Held(
        rows=rows,
        columns=columns,
        norms=norms,
        line=line,
        lane=lane,
        row=row,
        column=column,
        state=state,
        norm=norm,
        of_columns=of_columns,
        load=load,
        store=store,
        take=take,
        put=put,
    )


class Fetched(Namespace):
    """A thread's numbers of a tile that is on its way to shared memory: loads wait for nothing before they are put."""

    count: int
    line: Callable[..., Any]  # (n) -> the line of number n, and its column
    column: Callable[..., Any]
    frag: Callable[..., Any]  # () -> a local array
    load: Callable[..., None]  # (frag, part); zeros beyond its lines and columns
    put: Callable[..., None]  # (smem, frag, lines): so many of the tile


def fetched(dtype: str, tile: Tile) -> Fetched:
    """The noun for a tile of lines side by side, of an array of this dtype."""
    mem, number, width = storage(dtype), storage(dtype).number, tile.width
    num, count = numbers(number), cdiv(tile.rows * width, THREADS)

    @verb
    def line(n):
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) // u32(width))

    @verb
    def column(n):
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) % u32(width))

    @verb
    def frag():
        return cuda.local.array(count, number)

    @verb
    def load(frag, part):
        for n in range(count):
            r, c = min(line(n), i32(part.count - 1)), min(column(n), i32(part.columns - 1))
            value = mem.load(part.data, part.first + r * part.step + c)
            frag[n] = value if (line(n) < part.count) & (column(n) < part.columns) else num.zero

    @verb
    def put(smem, frag, lines):
        for n in range(count):
            if line(n) < lines:
                smem[u32(tile.place(line(n), column(n)))] = frag[n]

    return Fetched(count=count, line=line, column=column, frag=frag, load=load, put=put)
