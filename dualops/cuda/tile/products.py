"""Multiply tiles in shared memory on CUDA cores, by lines x lanes threads, with sums in registers.

    qk = mma_abt(f32, tile.q, tile.k, 4, 4)     a noun, made when the kernel is built
    scores = qk.fragment()                      this thread's part of the product
    qk.clear(scores)
    qk.add(scores, smem)                        scores += Q @ K.T

Thread number line * lanes + lane has `rows` rows of the result, from line * rows on. In a product A @ B.T, it has
columns lane, lane + lanes, ... of these rows. In A @ B and A.T @ B it has `near` neighbours, usually four, of every
lanes * near columns. Products add to the fragment: clear it first to get only the product. A @ B.T and A @ B sum four
numbers of a row at a time. So A and B must be zero after their widths, or the depth passed to `add_part` a multiple of
four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, Namespace, cuda, kept_noun, members, u32, verb
from ..ptx.arithmetic import opaque_f32 as opaque_f32, opaque_i32, recomputed_i32 as recomputed_i32
from .numbers import numbers
from .shared import Tile
from .unrolled import local_array

LANES = 16  # threads that share a row; also the lines of threads in a block
THREADS = LANES * LANES


class Mma(Namespace):
    """out += the product of two tiles in smem. `out` is a local array: a thread's part of the result.

    out[i * columns + c] is in row line * rows + i and column `column(c)` of the result.
    """

    size: int  # numbers in the part
    rows: int  # adjacent rows of the result in the part
    columns: int  # numbers per row
    fragment: Callable[..., Any]  # () -> a local array for the part
    clear: Callable[..., None]  # (out)
    add: Callable[..., None]  # (out, smem): the whole product
    add_part: Callable[..., None]  # (out, smem, first, depth): `depth` steps of the sum; A's numbers begin at `first`
    column: Callable[..., Any]  # (c) -> the column of a row's number c


class CountedMma(Mma):
    """A @ B, where a number -0 in A means that this row of B does not count for this row of the result."""

    add_counted: Callable[..., None]  # (out, smem, depth): skips pairs with -0 in A, even if B has NaN there


@kept_noun
def neighbours(number: Any, near: int) -> Members:
    """The verb that loads `near` neighbours from shared memory.

    If `near` is a multiple of four, it loads four at once; then `index` must be a multiple of four, too.
    """
    num = numbers(number)

    @verb
    def _one_by_one(frag, at, smem, index):
        for i in range(near):
            frag[at + i] = smem[index + i]

    @verb
    def _by_four(frag, at, smem, index):
        for i in range(0, near, 4):
            num.load_four(frag, at + i, smem, index + i)

    return members(
        locals(),
        load=_one_by_one if near % 4 else _by_four,  # (frag, at, smem, index)
    )


def mma_abt(number: Any, a: Tile, b: Tile, rows: int, columns: int, lanes: int = LANES, *, looped: bool = False) -> Mma:
    """out += A @ B.T. looped: steps of the sum are not unrolled; unrolling many steps costs registers.

    Raises ValueError if the number of B's rows is not the number of the result's columns.
    """
    num = numbers(number)
    if b.rows != lanes * columns:
        raise ValueError(
            f"A @ B.T: B has {b.rows} rows, expected {lanes} x {columns}, one for each column of the result"
        )

    @verb
    def add_four(out, smem, a_at, a_row, b_at, b_row):
        """Add four steps of the sum. My rows are a_row, ... of A, which begins at a_at, and b_row, ... of B at b_at."""
        row = cuda.local.array(4, number)  # four numbers of a row of A
        others = cuda.local.array(4 * columns, number)  # and of my rows of B
        for j in range(columns):
            num.load_four(others, 4 * j, smem, b_at + (b_row + lanes * j) * b.row)
        for i in range(rows):
            num.load_four(row, 0, smem, a_at + (a_row + i) * a.row)
            for j in range(columns):
                for c in range(4):
                    out[i * columns + j] += row[c] * others[4 * j + c]

    @verb
    def add_part(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        if looped:
            d = 0
            while d < depth:
                mine, theirs = opaque_i32(first + line * rows * a.row + d), opaque_i32(b.at + lane * b.row + d)
                add_four(out, smem, mine, 0, theirs, 0)
                d += 4
        else:
            for d in range(0, depth, 4):
                add_four(out, smem, first + d, line * rows, b.at + d, lane)

    @verb
    def column(c):
        return cuda.threadIdx.x % lanes + lanes * c

    return Mma(column=column, **_members(number, rows, columns, add_part, a.at, -(-a.width // 4) * 4))


def mma_ab(
    number: Any, a: Tile, b: Tile, rows: int, near: int = 4, lanes: int = LANES, *, looped: bool = False
) -> CountedMma:
    """out += A @ B. looped: as in `mma_abt`; the product is summed before it is added to out: more accurate.

    Raises ValueError if B's rows are not padded to a multiple of lanes * near.
    """
    num, near_b = numbers(number), neighbours(number, near)
    groups = _groups(b, lanes * near)

    @verb
    def add_four(out, at, apart, smem, a_at, a_row, b_at):
        """Add four steps of the sum to out[at + i * apart + c]. My rows are a_row, ... of A, which begins at a_at."""
        row = cuda.local.array(4, number)  # four numbers of a row of A
        others = cuda.local.array(4 * near, number)  # of four rows of B
        for k in range(4):
            near_b.load(others, near * k, smem, b_at + k * b.row)
        for i in range(rows):
            num.load_four(row, 0, smem, a_at + (a_row + i) * a.row)
            for k in range(4):
                for c in range(near):
                    out[at + i * apart + c] += row[k] * others[near * k + c]

    @verb
    def add_part(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        if looped:
            piece = cuda.local.array(rows * near, number)
            for g in range(groups):
                for e in range(rows * near):
                    piece[e] = num.zero
                n = 0
                while n < depth:
                    mine = opaque_i32(first + line * rows * a.row + n)
                    theirs = opaque_i32(b.at + n * b.row + (g * lanes + lane) * near)
                    add_four(piece, 0, near, smem, mine, 0, theirs)
                    n += 4
                for i in range(rows):
                    for c in range(near):
                        out[(i * groups + g) * near + c] += piece[i * near + c]
        else:
            for n in range(0, depth, 4):
                for g in range(groups):
                    theirs = b.at + n * b.row + (g * lanes + lane) * near
                    add_four(out, g * near, groups * near, smem, first + n, line * rows, theirs)

    @verb
    def add_counted(out, smem, depth):
        lane, line = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        for n in range(depth):
            for i in range(rows):
                weight = smem[u32(a.at + (line * rows + i) * a.row + n)]
                if not num.is_minus_zero(weight):
                    for g in range(groups):
                        for c in range(near):
                            value = smem[u32(b.at + n * b.row + (g * lanes + lane) * near + c)]
                            out[(i * groups + g) * near + c] += weight * value

    members = _members(number, rows, near * groups, add_part, a.at, a.width)
    return CountedMma(column=_in_groups(near, lanes), add_counted=add_counted, **members)


def mma_atb(number: Any, a: Tile, b: Tile, rows: int, near: int = 4, lanes: int = LANES) -> Mma:
    """out += A.T @ B, one row of A and of B after the other. Raises ValueError as `mma_ab` does."""
    near_a, near_b = neighbours(number, rows), neighbours(number, near)
    groups = _groups(b, lanes * near)
    columns = near * groups

    @verb
    def add_part(out, smem, first, depth):
        lane, line = cuda.threadIdx.x % lanes, cuda.threadIdx.x // lanes
        column = cuda.local.array(rows, number)  # my rows of A.T
        row = cuda.local.array(columns, number)  # of a row of B
        n = 0
        while n < depth:  # a range would keep a second counter
            mine = opaque_i32(first + n * a.row + line * rows)
            theirs = opaque_i32(b.at + n * b.row + lane * near)
            near_a.load(column, 0, smem, mine)
            for g in range(groups):
                near_b.load(row, near * g, smem, theirs + g * lanes * near)
            for i in range(rows):
                for c in range(columns):
                    out[i * columns + c] += column[i] * row[c]
            n += 1

    return Mma(column=_in_groups(near, lanes), **_members(number, rows, columns, add_part, a.at, a.rows))


def _members(
    number: Any, rows: int, columns: int, add_part: Callable[..., None], first: int, depth: int
) -> dict[str, Any]:
    """Return the members that all products share."""
    num, size = numbers(number), rows * columns

    @verb
    def clear(out):
        for e in range(size):
            out[e] = num.zero

    @verb
    def add(out, smem):
        add_part(out, smem, first, depth)

    sizes = {"size": size, "rows": rows, "columns": columns}
    return sizes | {"fragment": local_array(size, number), "clear": clear, "add": add, "add_part": add_part}


def _groups(b: Tile, together: int) -> int:
    """Return how many groups of `together` columns, which all threads handle at once, a row of B has."""
    groups = -(-b.width // together)
    if b.filled < groups * together:
        raise ValueError(f"a product with B: its rows have {b.filled} numbers, expected a multiple of {together}")
    return groups


def _in_groups(near: int, lanes: int) -> Callable[..., Any]:
    """Return the verb `column` of `Mma`, for `near` neighbours in every lanes * near columns."""

    @verb
    def column(c):
        return (c // near * lanes + cuda.threadIdx.x % lanes) * near + c % near

    return column
