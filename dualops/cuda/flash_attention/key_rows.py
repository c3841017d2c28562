"""What the rows of a tile of keys are, which tile of queries comes after another, or before it, how many blocks add to
a tile's dq before one does, and where that lies among the sums of all tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Namespace, i32, i64, u32, verb
from .options import OptionChain
from .tile_scheduler import tile_after
from .varlen_tiles import packed_tiles


@verb
def tile_before(task, h, m0, block_q, last):
    """The same of the tile before this one: of the same head, or the next one's `last`."""
    m0 = i32(m0 - block_q)
    return (i32(h), m0) if m0 >= task.first else (i32(h + 1), i32(last))


class TileOrder(Namespace):
    """In which order a block of keys takes the tiles of queries of each head that see some of them."""

    start: Callable[..., Any]  # (task) -> first query of the first one
    next: Callable[..., Any]  # (task, h, m0, start) -> head and first query of the one after this
    rank: Callable[..., Any]  # (task, m0, options) -> how many blocks take this one before


def from_the_last(block_kv: int, block_q: int) -> TileOrder:
    """From the last tile on, by blocks of ascending keys: each follows the one before it a tile apart."""

    @verb
    def start(task):
        return i32(u32(max(i32(task.end), i32(1)) - 1) // u32(block_q) * u32(block_q))

    @verb
    def next(task, h, m0, start):
        return tile_before(task, h, m0, block_q, start)

    @verb
    def rank(task, m0, options):
        return i32(u32(task.n0) // u32(block_kv))

    return TileOrder.from_locals(locals())


def from_the_first(block_kv: int, block_q: int, chain: OptionChain) -> TileOrder:
    """From the first tile on, by blocks of descending keys. Where a mask hides what comes later, a block's first tile
    is seen from no later keys, or from one block's: so nobody waits before its first ones.
    """

    @verb
    def start(task):
        return i32(task.first)

    @verb
    def next(task, h, m0, start):
        return tile_after(task, h, m0, block_q)

    @verb
    def rank(task, m0, options):
        _, n_end = chain.key_range(options, m0, min(i32(m0 + block_q), task.Sq), task.offset, task.Sk)
        return i32(u32(i32(n_end) - 1) // u32(block_kv)) - i32(u32(task.n0) // u32(block_kv))

    return TileOrder.from_locals(locals())


def place_of_sum(block_q: int, varlen: bool) -> Callable[..., Any]:
    """The verb (task, H, h, tile, q_tiles) -> which of the tiles' sums is that of this tile of head h's queries.

    q_tiles: a head's, of a batch or, of varlen, of all sequences (`packed_count`).
    """
    tiles = packed_tiles(block_q)

    @verb
    def of_batch(task, H, h, tile, q_tiles):
        return i64(task.b * H + h) * q_tiles + tile

    @verb
    def of_sequence(task, H, h, tile, q_tiles):
        return i64(h) * q_tiles + i32(tiles.after(task.q_first, task.b) + tile)

    return of_sequence if varlen else of_batch
