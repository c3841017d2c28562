"""A tile of scores of 16 x 16 threads: options change it, and it goes to shared memory for the next product."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, Noun, cuda, i32, i64, kept_noun, members, noun, verb
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, Mma, opaque_i32
from ..tile.shared import Lines, Tile
from ..tile.storage import storage
from .arguments import spans
from .options import OptionChain, pair_places

Scores = Noun  # of `score_tile`


class Where(NamedTuple):
    """Where a tile of scores is: batch, head, its first query and key; and the lengths of the sequence."""

    b: Any
    h: Any
    m0: Any
    n0: Any
    Sq: Any
    Sk: Any
    offset: Any  # position of query 0 among the keys


@verb
def where_of(task, h, m0, n0):
    """Return where a tile of a task's scores is."""
    return Where(task.b, h, m0, n0, task.Sq, task.Sk, task.offset)


class Block(NamedTuple):
    """What a block owns: queries, or keys, of a head from `first` on; and its sequence."""

    b: Any
    h: Any
    h_kv: Any
    first: Any
    q_first: Any  # tokens of varlen before this sequence
    k_first: Any
    Sq: Any
    Sk: Any


@kept_noun
def blocks(varlen: bool, rows: int) -> Members:
    """The verbs of blocks with this many queries, or keys."""
    span = spans(varlen)

    @verb
    def of_queries(work):
        """Return the `Block` of queries, the last first: with a causal mask the longest."""
        q_blocks = (work.Sq + rows - 1) // rows
        head, m0 = cuda.blockIdx.x // q_blocks, (q_blocks - 1 - cuda.blockIdx.x % q_blocks) * rows
        b, h = i64(head // work.H), i64(head % work.H)
        q_first, k_first, Sq, Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
        return Block(b, h, h // work.group, m0, q_first, k_first, Sq, Sk)

    @verb
    def of_keys(work):
        """Return the `Block` of keys. Its h is the first head of the group."""
        kv_blocks = (work.Sk + rows - 1) // rows
        head, n0 = cuda.blockIdx.x // kv_blocks, cuda.blockIdx.x % kv_blocks * rows
        heads_kv = work.H // work.group
        b, h_kv = i64(head // heads_kv), i64(head % heads_kv)
        q_first, k_first, Sq, Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
        return Block(b, h_kv * work.group, h_kv, n0, q_first, k_first, Sq, Sk)

    return members(locals(), key_out=span.key_out)


@noun
def score_tile(
    chain: OptionChain, dtype: str, product: Mma, tile: Tile, *, gradient: bool = False, transposed: bool = False
) -> Members:
    """The verbs for the scores of `product`, in a tile of shared memory. Rows are queries and columns keys, or
    transposed.

    If only ranges mask scores, they stay in registers. An option may take many instructions for one score, so its code
    is not repeated for each of a thread's scores: they go through the thread's own places of the tile, in a loop.

    finish: applies all options. A hidden score becomes -inf, or in a gradient -0, which no other score is. A NaN row
    makes the gradient of a key with a score of -inf NaN, but not that of a hidden key. slopes: d score / d (scale *
    product), 0 where a range hides it. weights: for all pairs within the sequence; other places are undefined.
    """
    number = storage(dtype).number
    num, pair_at = numbers(number), pair_places(number)
    ROWS, COLUMNS, COUNT, TRANSPOSED = product.rows, product.columns, product.size, transposed
    RANGES_ALONE = not (chain.scores or chain.picks)
    BLOCK_Q, BLOCK_KV = (tile.width, tile.rows) if transposed else (tile.rows, tile.width)

    @verb
    def at(e):
        """Return where score e of this thread lies in the tile."""
        line, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        return tile.at + (line * ROWS + e // COLUMNS) * tile.row + lane + LANES * (e % COLUMNS)

    @verb
    def _seen(options, where, r):
        """Return first and end of the columns that row r of mine sees, counted from my first column."""
        mine, lane = cuda.threadIdx.x // LANES * ROWS, cuda.threadIdx.x % LANES
        if TRANSPOSED:
            j = i32(apart(where.n0 + mine, where.m0) + r)
            first, end = chain.queries(options, j, i32(j - where.offset), where.Sq)
            origin, there = i32(where.m0 + lane), j < where.Sk
        else:
            i = i32(apart(where.m0 + mine, where.n0) + r)
            first, end = chain.keys(options, i, i32(i + where.offset), where.Sk)
            origin, there = i32(where.n0 + lane), i < where.Sq
        return i32(first - origin), i32(end - origin) if there else i32(0)

    @verb
    def _within(e, first, end):
        column = i32(LANES * (e % COLUMNS))
        return (column >= first) & (column < end)

    HIDDEN = num.minus_zero if gradient else num.minus_inf

    @verb
    def _shown(score):
        return score + num.zero if gradient else score  # no -0

    @verb
    def counts(score, lse):
        """Return whether a finished score counts in a gradient. lse: of its row."""
        return not num.is_minus_zero(score) and (score != num.minus_inf or lse != lse)

    @verb
    def _place(where, row, column):
        i, j = (column, row) if TRANSPOSED else (row, column)
        i, j = i32(where.m0 + i), i32(where.n0 + j)
        return pair_at(where.b, where.h, i, j, where.offset)

    @verb
    def _my_place(where, e):
        line, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        return _place(where, i32(line * ROWS + e // COLUMNS), i32(lane + LANES * (e % COLUMNS)))

    @verb
    def _whole(options, where):
        m1, n1 = where.m0 + BLOCK_Q, where.n0 + BLOCK_KV
        return chain.full(options, where.m0, m1, where.n0, n1, where.offset, where.Sq, where.Sk)

    @verb
    def _masked(scores, options, scale, where):
        for e in range(COUNT):
            scores[e] = _shown(scores[e] * scale)
        if not _whole(options, where):
            for r in range(ROWS):
                first, end = _seen(options, where, r)
                for e in range(r * COLUMNS, (r + 1) * COLUMNS):
                    if not _within(e, first, end):
                        scores[e] = HIDDEN

    @verb
    def finish(scores, smem, options, scale, where):
        """Turn products into scores."""
        if RANGES_ALONE:
            _masked(scores, options, scale, where)
        else:
            all_seen = _whole(options, where)
            for e in range(COUNT):
                smem[at(e)] = scores[e] * scale
            for e in range(COUNT):
                score, here = HIDDEN, _my_place(where, e)
                first, end = _seen(options, where, e // COLUMNS)
                if all_seen or (_within(e, first, end) and chain.pick(options, here)):
                    score = _shown(chain.score(smem[at(e)], options, here))
                smem[at(e)] = score
            for e in range(COUNT):
                scores[e] = smem[at(e)]

    @verb
    def slopes(slopes, scores, smem, options, scale, where):
        """Compute the slopes of products, before `finish`."""
        for e in range(COUNT):
            smem[at(e)] = scores[e] * scale
        for e in range(COUNT):
            slope = num.zero
            first, end = _seen(options, where, e // COLUMNS)
            if _within(e, first, end):
                slope = chain.slope(smem[at(e)], options, _my_place(where, e))
            smem[at(e)] = slope
        for e in range(COUNT):
            slopes[e] = smem[at(e)]

    # a call returns eight weights: queries i and i + 8, BELOW apart in the tile, by keys j, j + 1, j + 8 and j + 9
    CALLS = tile.rows * tile.width // 8
    ACROSS = (tile.rows if transposed else tile.width) // 4
    BELOW, RIGHT = (8, tile.row) if transposed else (8 * tile.row, 1)

    @verb
    def _put_four(smem, corner, four):
        smem[corner], smem[corner + RIGHT], smem[corner + BELOW], smem[corner + BELOW + RIGHT] = four

    @verb
    def weights(smem, options, where):
        """Write the weights of the whole tile; by all threads of the block."""
        if not RANGES_ALONE:
            cuda.syncthreads()  # scores used these places before
        for call in range(cuda.threadIdx.x, CALLS, THREADS):
            upper, pair = call // ACROSS, call % ACROSS
            i, j = i32(upper // 8 * 16 + upper % 8), i32(pair // 4 * 16 + 2 * (pair % 4))
            row, column = (j, i) if TRANSPOSED else (i, j)
            if (where.m0 + i < where.Sq) & (where.n0 + j < where.Sk):
                here, corner = _place(where, row, column), tile.place(row, column)
                near, far = chain.weights(options, here)
                _put_four(smem, corner, near)
                _put_four(smem, corner + 8 * RIGHT, far)
        cuda.syncthreads()

    return locals()


@verb
def apart(row, passing):
    """Return a row's number, recomputed for each tile: otherwise the ranges of all rows would stay in registers."""
    return opaque_i32(i32(row - passing)) + passing


@verb
def lines(x, b, h, token, count):
    """Return `count` rows of an array, from a token on."""
    return Lines(x.data, start(x, b, h, token), x.strides[2], count)
