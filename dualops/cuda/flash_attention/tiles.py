"""What 16 x 16 threads do with a tile of scores: through the options, and to shared memory for the next product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...spec.attention import At
from ..backend import Namespace, cuda, i64, verb
from ..tile.numbers import numbers
from ..tile.products import LANES, Mma
from ..tile.shared import Lines, Tile
from ..tile.storage import storage
from ..views import start
from .options import OptionChain


class Scores(Namespace):
    """The verbs of a tile of scores: rows are queries and columns keys, or the other way round.

    What options do to a score may be long, so it is not repeated for each score that a thread holds: the thread's
    scores go through its own places of a tile of shared memory, and a loop takes one after another.
    """

    at: Callable[..., Any]  # (e) -> where number e of a thread lies in the tile
    finish: Callable[..., None]  # (scores, smem, options, whole, scale, where): products become scores
    slopes: Callable[..., None]  # (slopes, scores, smem, options, scale, where): of products, before `finish`
    weights: Callable[..., None]  # (smem, options, where): to my places


class Where(NamedTuple):
    """Where a thread's scores stand: batch, head, its first row and column, and how many of each there are."""

    b: Any
    h: Any
    row: Any
    column: Any
    rows: Any
    columns: Any
    offset: Any  # position of query 0 among the keys


def score_tile(chain: OptionChain, dtype: str, product: Mma, tile: Tile, *, transposed: bool = False) -> Scores:
    """The verbs for the scores that `product` makes; `tile` holds as many.

    finish: through all options; -inf where a mask is or where there is nothing. `whole`: all of the tile is there and
    seen. slopes: d score / d (scale * product), 0 where there is nothing. weights: likewise.
    """
    num = numbers(storage(dtype).number)
    ROWS, COLUMNS, COUNT, TRANSPOSED, PLAIN = product.rows, product.columns, product.size, transposed, not chain.scores

    @verb
    def at(e):
        line, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        return tile.at + (line * ROWS + e // COLUMNS) * tile.row + lane + LANES * (e % COLUMNS)

    @verb
    def place(where, e):
        row, column = where.row + e // COLUMNS, where.column + LANES * (e % COLUMNS)
        i, j = (column, row) if TRANSPOSED else (row, column)
        return At(where.b, where.h, i64(i), i64(j), i64(i + where.offset))

    @verb
    def there(where, e):
        row, column = where.row + e // COLUMNS, where.column + LANES * (e % COLUMNS)
        return (row < where.rows) & (column < where.columns)

    @verb
    def finish(scores, smem, options, whole, scale, where):
        if PLAIN and whole:
            for e in range(COUNT):
                scores[e] *= scale
        else:
            for e in range(COUNT):
                smem[at(e)] = scores[e] * scale
            for e in range(COUNT):
                score = num.minus_inf
                if there(where, e):
                    here = place(where, e)
                    if whole or chain.visible(options, here):
                        score = chain.score(smem[at(e)], options, here)
                smem[at(e)] = score
            for e in range(COUNT):
                scores[e] = smem[at(e)]

    @verb
    def slopes(slopes, scores, smem, options, scale, where):
        for e in range(COUNT):
            smem[at(e)] = scores[e] * scale
        for e in range(COUNT):
            slope = num.zero
            if there(where, e):
                slope = chain.slope(smem[at(e)], options, place(where, e))
            smem[at(e)] = slope
        for e in range(COUNT):
            slopes[e] = smem[at(e)]

    @verb
    def weights(smem, options, where):
        for e in range(COUNT):
            weight = num.zero
            if there(where, e):
                weight = chain.weight(options, place(where, e))
            smem[at(e)] = weight

    return Scores(at=at, finish=finish, slopes=slopes, weights=weights)


@verb
def lines(x, b, h, token, count):
    """`count` rows of an array, from a token's on."""
    return Lines(x.data, start(x, b, h, token), x.strides[2], count)
