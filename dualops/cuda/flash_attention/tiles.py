"""Tiles of the simt rung: what 16 x 16 threads do together with rows in shared memory and numbers in registers.

Thread (line, lane) owns `tile_rows` rows from line * tile_rows on, and of them the columns lane, lane + 16, ...
(`tile_columns` of scores), or of a result four neighbours in every 64. Rows in shared memory lie a multiple of four
numbers and four more apart, so that lanes on neighbouring rows meet different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ...spec.attention import At
from ..arrays import align_up
from ..backend import Namespace, cuda, i32, i64, verb
from ..tile.numbers import numbers
from ..tile.products import LANES, PAD, THREADS, row_of as row_of
from ..tile.storage import storage
from .options import OptionChain


def columns_of(width: int) -> int:
    """Columns of a result that a thread holds, in groups of four."""
    return align_up(width, 64) // LANES


class Tiles(Namespace):
    """The verbs; `to`, `a`, `b`, `p`, `v` are places in shared memory where rows of `row` numbers begin."""

    load: Callable[..., Any]  # (smem, to, row, rows, width, x, base, stride, end) -> 1 if I met a NaN or an infinity
    abt: Callable[..., None]  # (out, frag, frags, smem, a, a_row, b, b_row, depth, line, lane): out = A @ B.T
    ab: Callable[..., None]  # (acc, frag, frags, smem, p, p_row, v, v_row, count, groups, line, lane): acc += P @ V
    ab_counted: Callable[..., None]  # the same, leaving out pairs whose P is -0
    mine: Callable[..., Any]  # (p, p_row, e) -> where number e of a thread lies in rows of scores


@cache
def tiles(dtype: str, tile_rows: int, tile_columns: int) -> Tiles:
    """The verbs for arrays of `dtype` and threads that hold tile_rows x tile_columns scores."""
    mem = storage(dtype)
    num = numbers(mem.number)
    TILE_ROWS, TILE_COLUMNS, COUNT = tile_rows, tile_columns, tile_rows * tile_columns

    @verb
    def load(smem, to, row, rows, width, x, base, stride, end):
        strange = i32(0)
        for at in range(cuda.threadIdx.x, rows * (row - PAD), THREADS):
            r, c = at // (row - PAD), at % (row - PAD)
            value = num.zero
            if (r < end) & (c < width):
                value = mem.load(x, base + r * stride + c)
            smem[to + r * row + c] = value
            strange |= i32(value * num.zero != num.zero)
        return strange

    @verb
    def abt(out, frag, frags, smem, a, a_row, b, b_row, depth, line, lane):
        for i in range(COUNT):
            out[i] = num.zero
        for d in range(0, depth, 4):
            for j in range(TILE_COLUMNS):
                num.load_four(frags, 4 * j, smem, b + (lane + LANES * j) * b_row + d)
            for i in range(TILE_ROWS):
                num.load_four(frag, 0, smem, a + (line * TILE_ROWS + i) * a_row + d)
                for j in range(TILE_COLUMNS):
                    for c in range(4):
                        out[i * TILE_COLUMNS + j] += frag[c] * frags[4 * j + c]

    @verb
    def ab(acc, frag, frags, smem, p, p_row, v, v_row, count, groups, line, lane):
        for n in range(0, count, 4):
            for g in range(groups):
                for k in range(4):
                    num.load_four(frags, 4 * k, smem, v + (n + k) * v_row + g * 64 + 4 * lane)
                for i in range(TILE_ROWS):
                    num.load_four(frag, 0, smem, p + (line * TILE_ROWS + i) * p_row + n)
                    for k in range(4):
                        for c in range(4):
                            acc[(i * groups + g) * 4 + c] += frag[k] * frags[4 * k + c]

    @verb
    def ab_counted(acc, frag, frags, smem, p, p_row, v, v_row, count, groups, line, lane):
        for n in range(count):
            for i in range(TILE_ROWS):
                prob = smem[p + (line * TILE_ROWS + i) * p_row + n]
                if not num.is_minus_zero(prob):
                    for g in range(groups):
                        for c in range(4):
                            acc[(i * groups + g) * 4 + c] += prob * smem[v + n * v_row + g * 64 + 4 * lane + c]

    @verb
    def mine(p, p_row, e):
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        return p + (line * TILE_ROWS + e // TILE_COLUMNS) * p_row + lane + LANES * (e % TILE_COLUMNS)

    return Tiles(load=load, abt=abt, ab=ab, ab_counted=ab_counted, mine=mine)


class Scores(Namespace):
    """The verbs of a tile of scores: rows are queries and columns keys, or the other way round.

    What options do to a score may be long, so it is not repeated for each score that a thread holds: the thread's
    scores go through its own places of `p` in shared memory, and a loop takes one after another.
    """

    finish: Callable[..., None]  # (scores, smem, p, options, whole, scale, where): products become scores
    slopes: Callable[..., None]  # (slopes, scores, smem, p, options, scale, where): of products, before `finish`
    weights: Callable[..., None]  # (smem, p, options, where): to my places of `p`


class Where(NamedTuple):
    """Where a thread's scores stand: batch, head, its first row and column, and how many of each there are."""

    b: Any
    h: Any
    row: Any
    column: Any
    rows: Any
    columns: Any
    offset: Any  # position of query 0 among the keys


@cache
def score_tiles(
    chain: OptionChain, dtype: str, tile_rows: int, tile_columns: int, p_row: int, transposed: bool
) -> Scores:
    """The verbs for threads that hold tile_rows x tile_columns scores; rows of `p` are p_row numbers apart.

    finish: through all options; -inf where a mask is or where there is nothing. `whole`: all of the tile is there and
    seen. slopes: d score / d (scale * product), 0 where there is nothing. weights: likewise.
    """
    TILE_COLUMNS, P_ROW, TRANSPOSED = tile_columns, p_row, transposed
    COUNT, PLAIN = tile_rows * tile_columns, not chain.scores
    num, tile = numbers(storage(dtype).number), tiles(dtype, tile_rows, tile_columns)

    @verb
    def place(where, e):
        row, column = where.row + e // TILE_COLUMNS, where.column + LANES * (e % TILE_COLUMNS)
        i, j = (column, row) if TRANSPOSED else (row, column)
        return At(where.b, where.h, i64(i), i64(j), i64(i + where.offset))

    @verb
    def there(where, e):
        row, column = where.row + e // TILE_COLUMNS, where.column + LANES * (e % TILE_COLUMNS)
        return (row < where.rows) & (column < where.columns)

    @verb
    def finish(scores, smem, p, options, whole, scale, where):
        if PLAIN and whole:
            for e in range(COUNT):
                scores[e] *= scale
        else:
            for e in range(COUNT):
                smem[tile.mine(p, P_ROW, e)] = scores[e] * scale
            for e in range(COUNT):
                score = num.minus_inf
                if there(where, e):
                    at = place(where, e)
                    if whole or chain.visible(options, at):
                        score = chain.score(smem[tile.mine(p, P_ROW, e)], options, at)
                smem[tile.mine(p, P_ROW, e)] = score
            for e in range(COUNT):
                scores[e] = smem[tile.mine(p, P_ROW, e)]

    @verb
    def slopes(slopes, scores, smem, p, options, scale, where):
        for e in range(COUNT):
            smem[tile.mine(p, P_ROW, e)] = scores[e] * scale
        for e in range(COUNT):
            slope = num.zero
            if there(where, e):
                slope = chain.slope(smem[tile.mine(p, P_ROW, e)], options, place(where, e))
            smem[tile.mine(p, P_ROW, e)] = slope
        for e in range(COUNT):
            slopes[e] = smem[tile.mine(p, P_ROW, e)]

    @verb
    def weights(smem, p, options, where):
        for e in range(COUNT):
            weight = num.zero
            if there(where, e):
                weight = chain.weight(options, place(where, e))
            smem[tile.mine(p, P_ROW, e)] = weight

    return Scores(finish=finish, slopes=slopes, weights=weights)
