"""Products of tiles in shared memory, into registers, by lanes x lanes threads without tensor cores.

Thread (line, lane) owns `rows` rows of the result from line * rows on. Of them it has, in a product A @ B.T, the
columns lane, lane + lanes, ... (`columns` of them), and in a product A @ B `near` neighbours, four as a rule, in
every lanes * near. Products add: who wants the product alone clears the fragment first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, u32, verb
from ..ptx.arithmetic import opaque_i32 as opaque_i32
from .numbers import numbers
from .shared import Tile

LANES = 16  # threads that share a row; also the lines of threads in a block
THREADS = LANES * LANES


class Mma(Namespace):
    """out += A @ B.T (`mma_abt`), or A @ B (`mma_ab`), of tiles of smem; `out` is a thread's part, a local array."""

    size: int  # numbers of the part
    rows: int  # of the result that a thread has, side by side
    columns: int  # numbers of each of them
    fragment: Callable[..., Any]  # () -> a local array for the part
    clear: Callable[..., None]  # (out)
    add: Callable[..., None]  # (out, smem): all of A and B
    add_part: Callable[..., None]  # (out, smem, a, depth): A begins at a, `depth` steps of the sum
    add_counted: Callable[..., None]  # (out, smem, depth): of A @ B, leaving out pairs whose number of A is -0
    column: Callable[..., Any]  # (number of a row) -> its column, beyond the thread's first


class Neighbours(Namespace):
    """How a thread gets neighbours from shared memory."""

    load: Callable[..., None]  # (frag, at, smem, index)


@cache
def neighbours(number: Any, near: int) -> Neighbours:
    """The verb for `near` neighbours: four at once where `near` is a multiple of four; then `index` must be one too."""
    NEAR = near
    if near % 4:

        @verb
        def one_by_one(frag, at, smem, index):
            for i in range(NEAR):
                frag[at + i] = smem[index + i]

        return Neighbours(load=one_by_one)
    num = numbers(number)

    @verb
    def by_four(frag, at, smem, index):
        for i in range(0, NEAR, 4):
            num.load_four(frag, at + i, smem, index + i)

    return Neighbours(load=by_four)


class _Part(Namespace):
    fragment: Callable[..., Any]
    clear: Callable[..., None]


def _part(number: Any, size: int) -> _Part:
    SIZE, zero = size, numbers(number).zero

    @verb
    def fragment():
        return cuda.local.array(SIZE, number)

    @verb
    def clear(out):
        for e in range(SIZE):
            out[e] = zero

    return _Part(fragment=fragment, clear=clear)


def mma_abt(number: Any, a: Tile, b: Tile, rows: int, columns: int, lanes: int = LANES, *, looped: bool = False) -> Mma:
    """out += A @ B.T. looped: steps of the sum are not unrolled, which costs registers where there are many."""
    num, part = numbers(number), _part(number, rows * columns)
    ROWS, COLUMNS, ACROSS, DEPTH, N_FRAGS = rows, columns, lanes, -(-a.width // 4) * 4, 4 * columns

    @verb
    def add_unrolled(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % ACROSS, cuda.threadIdx.x // ACROSS
        frag = cuda.local.array(4, number)  # of a row of A
        frags = cuda.local.array(N_FRAGS, number)  # of rows of B
        for d in range(0, depth, 4):
            for j in range(COLUMNS):
                num.load_four(frags, 4 * j, smem, b.at + (lane + ACROSS * j) * b.row + d)
            for i in range(ROWS):
                num.load_four(frag, 0, smem, first + (line * ROWS + i) * a.row + d)
                for j in range(COLUMNS):
                    for c in range(4):
                        out[i * COLUMNS + j] += frag[c] * frags[4 * j + c]

    @verb
    def add_looped(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % ACROSS, cuda.threadIdx.x // ACROSS
        frag = cuda.local.array(4, number)
        frags = cuda.local.array(N_FRAGS, number)
        d = 0
        while d < depth:
            mine, theirs = opaque_i32(first + line * ROWS * a.row + d), opaque_i32(b.at + lane * b.row + d)
            for j in range(COLUMNS):
                num.load_four(frags, 4 * j, smem, theirs + ACROSS * j * b.row)
            for i in range(ROWS):
                num.load_four(frag, 0, smem, mine + i * a.row)
                for j in range(COLUMNS):
                    for c in range(4):
                        out[i * COLUMNS + j] += frag[c] * frags[4 * j + c]
            d += 4

    add_part = add_looped if looped else add_unrolled

    @verb
    def add(out, smem):
        add_part(out, smem, a.at, DEPTH)

    @verb
    def column(c):
        return cuda.threadIdx.x % ACROSS + ACROSS * c

    return Mma(
        size=rows * columns,
        rows=rows,
        columns=columns,
        fragment=part.fragment,
        clear=part.clear,
        add=add,
        add_part=add_part,
        add_counted=None,
        column=column,
    )


def mma_ab(number: Any, a: Tile, b: Tile, rows: int, near: int = 4, lanes: int = LANES, *, looped: bool = False) -> Mma:
    """out += A @ B; looped: the same, and of a product that is summed before it is added: many lose less so."""
    num, near_b = numbers(number), neighbours(number, near)
    GROUPS = -(-b.width // (lanes * near))
    part = _part(number, rows * near * GROUPS)
    ROWS, NEAR, ACROSS, DEPTH, COLUMNS = rows, near, lanes, a.width, near * GROUPS
    N_FRAGS, N_PIECE = 4 * near, rows * near

    @verb
    def add_unrolled(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % ACROSS, cuda.threadIdx.x // ACROSS
        frag = cuda.local.array(4, number)  # of a row of A
        frags = cuda.local.array(N_FRAGS, number)  # of rows of B
        for n in range(0, depth, 4):
            for g in range(GROUPS):
                for k in range(4):
                    near_b.load(frags, NEAR * k, smem, b.at + (n + k) * b.row + (g * ACROSS + lane) * NEAR)
                for i in range(ROWS):
                    num.load_four(frag, 0, smem, first + (line * ROWS + i) * a.row + n)
                    for k in range(4):
                        for c in range(NEAR):
                            out[(i * GROUPS + g) * NEAR + c] += frag[k] * frags[NEAR * k + c]

    @verb
    def add_looped(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % ACROSS, cuda.threadIdx.x // ACROSS
        frag = cuda.local.array(4, number)
        frags = cuda.local.array(N_FRAGS, number)
        piece = cuda.local.array(N_PIECE, number)
        for g in range(GROUPS):
            for i in range(N_PIECE):
                piece[i] = num.zero
            n = 0
            while n < depth:
                mine = opaque_i32(first + line * ROWS * a.row + n)
                theirs = opaque_i32(b.at + n * b.row + (g * ACROSS + lane) * NEAR)
                for k in range(4):
                    near_b.load(frags, NEAR * k, smem, theirs + k * b.row)
                for i in range(ROWS):
                    num.load_four(frag, 0, smem, mine + i * a.row)
                    for k in range(4):
                        for c in range(NEAR):
                            piece[i * NEAR + c] += frag[k] * frags[NEAR * k + c]
                n += 4
            for i in range(ROWS):
                for c in range(NEAR):
                    out[(i * GROUPS + g) * NEAR + c] += piece[i * NEAR + c]

    add_part = add_looped if looped else add_unrolled

    @verb
    def add(out, smem):
        add_part(out, smem, a.at, DEPTH)

    @verb
    def add_counted(out, smem, depth):
        lane, line = cuda.threadIdx.x % ACROSS, cuda.threadIdx.x // ACROSS
        for n in range(depth):
            for i in range(ROWS):
                weight = smem[u32(a.at + (line * ROWS + i) * a.row + n)]
                if not num.is_minus_zero(weight):
                    for g in range(GROUPS):
                        for c in range(NEAR):
                            value = smem[u32(b.at + n * b.row + (g * ACROSS + lane) * NEAR + c)]
                            out[(i * GROUPS + g) * NEAR + c] += weight * value

    @verb
    def column(c):
        return (c // NEAR * ACROSS + cuda.threadIdx.x % ACROSS) * NEAR + c % NEAR

    return Mma(
        size=rows * COLUMNS,
        rows=rows,
        columns=COLUMNS,
        fragment=part.fragment,
        clear=part.clear,
        add=add,
        add_part=add_part,
        add_counted=add_counted,
        column=column,
    )
