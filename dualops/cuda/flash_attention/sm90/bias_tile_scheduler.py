"""Which tile of a bias a block of sm90's dbias has, and which tiles of scores it was added to, one after another.

These have other batches and heads, and other queries or keys if the bias has only one. They are numbered, keys fastest,
then queries, heads and batches. If the bias has few tiles, each is split in pieces with as many of these numbers. The
number of pieces depends on lengths alone (`pieces_of`); if the bias has batches, on those of one batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Members, Noun, i32, noun, u32, verb
from ...tile.boxes import Cluster
from ...tile.schedule import schedule
from ..options import OptionChain

# tiles of a column that are taken one after another, so that blocks that run at the same time share loads. With 132
# blocks, each then has other rows of a group in turn; a causal mask shows some of them more than others
GROUP_ROWS = 10
WANTED_PARTS = 512  # pieces of all tiles, for GPUs with about 132 SMs
LEAST_VISITS = 8  # of a piece


class BiasExtent(NamedTuple):
    """The sizes of the bias, 1 along axes where it is broadcast; the pieces of each tile; and the sizes of scores."""

    B_bias: Any
    H_bias: Any
    Sq_bias: Any
    Sk_bias: Any
    pieces: Any
    B: Any
    H: Any
    group: Any
    Sq: Any
    Sk: Any
    aligned: Any  # 1: the last query has the position of the last key; 0: the first query that of the first key


class Part(NamedTuple):
    """A piece of a tile of the bias: its place there, and first and end of its numbers."""

    b: Any
    h: Any
    m0: Any
    n0: Any
    piece: Any
    first: Any
    end: Any


class Visit(NamedTuple):
    """A tile of scores. v: its number, or the part's end after the last. h: head number `member` of h_kv's group."""

    v: Any
    b: Any
    h: Any
    h_kv: Any
    member: Any
    m0: Any
    n0: Any
    Sq: Any
    q_first: Any  # 0: sequences of different lengths have no bias


BiasWalk = Noun  # of `bias_walk`


class Broadcast(NamedTuple):
    """Whether a bias has only one row, or only one column."""

    row: bool
    column: bool


def visits_of_tile(B: Any, H: Any, q_tiles: Any, kv_tiles: Any, shape: tuple[Any, ...], one: Broadcast) -> Any:
    """Return how many tiles of scores a tile of a bias of this shape [B, H, Sq, Sk] was added to."""
    batches, heads = B if shape[0] == 1 else 1, H if shape[1] == 1 else 1
    return batches * heads * (q_tiles if one.row else 1) * (kv_tiles if one.column else 1)


def pieces_of(tiles: Any, visits: Any) -> Any:
    """Return the pieces of each tile. tiles: of a batch of the bias. visits: tiles of scores that each was added to."""
    wanted = (WANTED_PARTS + tiles - 1) // tiles
    return max(min(wanted, visits // LEAST_VISITS), 1)


@noun
def bias_walk(block_q: int, block_kv: int, one: Broadcast, chain: OptionChain, *, ranged: bool) -> Members:
    """The verbs for tiles of block_q queries and block_kv keys. ranged: whether some option is a mask of ranges; tiles
    that it hides are skipped.

    From visit to visit keys may stay, or, if the bias has one column, queries.
    """
    ONE_ROW, ONE_COLUMN, order = one.row, one.column, schedule(GROUP_ROWS, Cluster())
    WALKS = ONE_ROW or ONE_COLUMN

    @verb
    def _tiles(count, size):
        return u32((count + (size - 1)) // size)

    @verb
    def first_number():
        """Return the number of the part that this block begins with."""
        return i32(order.first())

    @verb
    def next_number(number):
        """Return the number of the part that comes next."""
        return i32(number + i32(order.step()))

    @verb
    def numbers(extent):
        """Return how many parts there are."""
        heads = u32(u32(extent.B_bias) * u32(extent.H_bias) * u32(extent.pieces))
        return i32(order.numbers(heads, _tiles(extent.Sq_bias, block_q), _tiles(extent.Sk_bias, block_kv)))

    @verb
    def part(number, extent):
        at = order.position(u32(number), _tiles(extent.Sq_bias, block_q), _tiles(extent.Sk_bias, block_kv))
        piece, head = u32(at.batch % u32(extent.pieces)), u32(at.batch // u32(extent.pieces))
        visits = u32(extent.B if extent.B_bias == 1 else 1) * u32(extent.H if extent.H_bias == 1 else 1)
        if ONE_ROW:
            visits = u32(visits * _tiles(extent.Sq, block_q))
        if ONE_COLUMN:
            visits = u32(visits * _tiles(extent.Sk, block_kv))
        each = u32(u32(visits + u32(extent.pieces) - u32(1)) // u32(extent.pieces))
        first = u32(piece * each)
        b, h = i32(head // u32(extent.H_bias)), i32(head % u32(extent.H_bias))
        m0, n0 = i32(at.m_block * u32(block_q)), i32(at.n_block * u32(block_kv))
        return Part(b, h, m0, n0, i32(piece), i32(min(first, visits)), i32(min(u32(first + each), visits)))

    @verb
    def _seen(visit, extent, offset, options):
        last = min(i32(visit.m0 + block_q), visit.Sq)
        first, end = chain.key_range(options, visit.m0, last, offset, extent.Sk)
        return (visit.n0 + block_kv > first) & (visit.n0 < end)

    @verb
    def _step(visit, part, extent):
        """Return the next number's visit, even if it is hidden."""
        b, h, h_kv, member, m0, n0 = visit.b, visit.h, visit.h_kv, visit.member, visit.m0, visit.n0
        if ONE_COLUMN:
            n0 = i32(n0 + block_kv)
        if not ONE_COLUMN or n0 >= extent.Sk:
            n0 = part.n0
            if ONE_ROW:
                m0 = i32(m0 + block_q)
            if not ONE_ROW or m0 >= extent.Sq:
                m0 = part.m0
                if extent.H_bias > 1:
                    b = i32(b + 1)
                else:
                    h, member = i32(h + 1), i32(member + 1)
                    if member == extent.group:
                        h_kv, member = i32(h_kv + 1), i32(0)
                    if h == extent.H:
                        b, h, h_kv = i32(b + 1), i32(0), i32(0)
        return Visit(i32(visit.v + 1), b, h, h_kv, member, m0, n0, visit.Sq, visit.q_first)

    @verb
    def _from_here(visit, part, extent, offset, options):
        """Return this visit, or the first visible one after it."""
        if ranged:
            while visit.v < part.end and not _seen(visit, extent, offset, options):
                if WALKS:
                    visit = _step(visit, part, extent)
                else:  # all others are hidden, too
                    at = visit.b, visit.h, visit.h_kv, visit.member, visit.m0, visit.n0
                    visit = Visit(part.end, *at, visit.Sq, visit.q_first)
        return visit

    @verb
    def first(part, extent, offset, options):
        rest, m0, n0 = u32(part.first), part.m0, part.n0
        if ONE_COLUMN:
            n0 = i32(rest % _tiles(extent.Sk, block_kv) * u32(block_kv))
            rest = u32(rest // _tiles(extent.Sk, block_kv))
        if ONE_ROW:
            m0 = i32(rest % _tiles(extent.Sq, block_q) * u32(block_q))
            rest = u32(rest // _tiles(extent.Sq, block_q))
        heads = u32(extent.H if extent.H_bias == 1 else 1)
        b, h = i32(part.b + i32(rest // heads)), i32(part.h + i32(rest % heads))
        h_kv, member = i32(u32(h) // u32(extent.group)), i32(u32(h) % u32(extent.group))
        visit = Visit(part.first, b, h, h_kv, member, m0, n0, extent.Sq, i32(0))
        return _from_here(visit, part, extent, offset, options)

    @verb
    def after(visit, part, extent, offset, options):
        return _from_here(_step(visit, part, extent), part, extent, offset, options)

    @verb
    def stays(visit, following):
        """Return whether what may stay does stay until that visit."""
        if ONE_COLUMN:
            return (visit.b == following.b) & (visit.h == following.h) & (visit.m0 == following.m0)
        return (visit.b == following.b) & (visit.h_kv == following.h_kv)

    return locals()
