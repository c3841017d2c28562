"""Products of matrices in shared memory, into registers, by 16 x 16 threads (lanes x lanes) without tensor cores.

Thread (line, lane) owns `tile_rows` rows from line * tile_rows on. Of them it has, in a product A @ B.T, the columns
lane, lane + 16, ... (`tile_columns` of them), and in a product A @ B or A.T @ B `near` neighbours, four as a rule, in
every 16 * near (`groups` of them). Rows in shared memory lie a multiple of four numbers and four more apart, so that
lanes on neighbouring rows meet different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, i32, u32, verb
from ..ptx.arithmetic import opaque_i32 as opaque_i32
from .numbers import numbers
from .storage import access, storage

LANES = 16  # threads that share a row; also the lines of threads in a block
THREADS = LANES * LANES
PAD = 4  # numbers between rows


def row_of(width: int) -> int:
    """Numbers from one row to the next in shared memory."""
    return -(-width // 4) * 4 + PAD


class Products(Namespace):
    """The verbs; a, b, p, v are places in shared memory where rows of a_row, ... numbers begin.

    frag, frags, piece: local arrays of 4, of max(4 * tile_columns, 16) and of near * tile_rows numbers; depth and
    count are multiples of four.
    """

    abt: Callable[..., None]  # (out, frag, frags, smem, a, a_row, b, b_row, depth, line, lane): out += A @ B.T
    # (acc, piece, frag, frags, smem, p, p_row, v, v_row, count, groups, line, lane): acc += P @ V, which is summed
    # before it is added: a sum of many tiles loses less so
    ab: Callable[..., None]
    ab_counted: Callable[..., None]  # (acc, smem, p, ...): acc += P @ V, leaving out pairs whose P is -0


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


@cache
def products(number: Any, tile_rows: int, tile_columns: int, near: int = 4, lanes: int = LANES) -> Products:
    """The verbs on numbers of type f32 or f64."""
    num = numbers(number)
    TILE_ROWS, TILE_COLUMNS, NEAR, N_PIECE, ACROSS = tile_rows, tile_columns, near, near * tile_rows, lanes
    near_v = neighbours(number, near)

    @verb
    def abt(out, frag, frags, smem, a, a_row, b, b_row, depth, line, lane):
        d = 0
        while d < depth:
            mine, theirs = opaque_i32(a + line * TILE_ROWS * a_row + d), opaque_i32(b + lane * b_row + d)
            for j in range(TILE_COLUMNS):
                num.load_four(frags, 4 * j, smem, theirs + ACROSS * j * b_row)
            for i in range(TILE_ROWS):
                num.load_four(frag, 0, smem, mine + i * a_row)
                for j in range(TILE_COLUMNS):
                    for c in range(4):
                        out[i * TILE_COLUMNS + j] += frag[c] * frags[4 * j + c]
            d += 4

    @verb
    def ab_counted(acc, smem, p, p_row, v, v_row, count, groups, line, lane):
        for n in range(count):
            for i in range(TILE_ROWS):
                prob = smem[u32(p + (line * TILE_ROWS + i) * p_row + n)]
                if not num.is_minus_zero(prob):
                    for g in range(groups):
                        for c in range(NEAR):
                            value = smem[u32(v + n * v_row + (g * ACROSS + lane) * NEAR + c)]
                            acc[(i * groups + g) * NEAR + c] += prob * value

    @verb
    def ab(acc, piece, frag, frags, smem, p, p_row, v, v_row, count, groups, line, lane):
        for g in range(groups):
            for i in range(N_PIECE):
                piece[i] = num.zero
            n = 0
            while n < count:
                mine = opaque_i32(p + line * TILE_ROWS * p_row + n)
                theirs = opaque_i32(v + n * v_row + (g * ACROSS + lane) * NEAR)
                for k in range(4):
                    near_v.load(frags, NEAR * k, smem, theirs + k * v_row)
                for i in range(TILE_ROWS):
                    num.load_four(frag, 0, smem, mine + i * p_row)
                    for k in range(4):
                        for c in range(NEAR):
                            piece[i * NEAR + c] += frag[k] * frags[NEAR * k + c]
                n += 4
            for i in range(TILE_ROWS):
                for c in range(NEAR):
                    acc[(i * groups + g) * NEAR + c] += piece[i * NEAR + c]

    return Products(abt=abt, ab=ab, ab_counted=ab_counted)


class TileLoad(Namespace):
    """How a tile of an array comes to shared memory."""

    size: int  # numbers that `frag` must hold
    # (smem, to, row, frag, x, base, stride, end, columns, weights) -> 1 if the tile is checked and this thread met
    # a NaN or an infinity. Row r begins at x[base + r * stride]; beyond `end` rows and `columns` columns all is 0
    load: Callable[..., Any]


@cache
def tile_load(
    dtype: str,
    aligned: bool,
    rows: int,
    width: int,
    threads: int = THREADS,
    *,
    weighted: bool = False,
    checked: bool = False,
) -> TileLoad:
    """The verb for a tile of `rows` rows of `width` numbers.

    width: a power of two, at most as large as threads. `aligned`: base, stride and columns are multiples of 16 bytes.
    `weighted`: row r is multiplied by smem[weights + r].
    """
    source, num = access(dtype, aligned, once=True), numbers(storage(dtype).number)
    vector = source.vector
    VECTOR, WIDTH, ROWS, WEIGHTED, CHECKED = vector, width, rows, weighted, checked
    ROWS_A_STEP = threads * vector // width
    STEPS = -(-rows // ROWS_A_STEP)
    EACH = num.vector if vector > 1 else 1
    FINITE, STRANGE = i32(0), i32(1)
    NONE, ALL = i32(0), i32(rows)

    @verb
    def load(smem, to, row, frag, x, base, stride, end, columns, weights):
        strange = FINITE
        r, c = cuda.threadIdx.x * VECTOR // WIDTH, cuda.threadIdx.x * VECTOR % WIDTH
        there = i32(min(end, ROWS)) if c < columns else NONE  # rows of mine
        at, put = base + r * stride + c, to + r * row + c
        for step in range(STEPS):
            place = i32(r + step * ROWS_A_STEP)
            if (STEPS * ROWS_A_STEP == ROWS) | (place < ALL):
                source.load(frag, 0, x, at, place < there, num.zero)
                for i in range(VECTOR):
                    if WEIGHTED:
                        frag[i] *= smem[u32(weights + place)]
                    if CHECKED:
                        strange |= STRANGE if frag[i] * num.zero != num.zero else FINITE
                if VECTOR == 1:
                    smem[u32(put)] = frag[0]
                else:
                    for i in range(0, VECTOR, EACH):
                        num.store_vector(smem, put + i, frag, i)
            at += ROWS_A_STEP * stride
            put += ROWS_A_STEP * row
        return strange

    return TileLoad(size=vector, load=load)
