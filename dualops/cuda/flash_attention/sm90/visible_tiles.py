"""What the rows of a tile of queries are, and which tiles a work item visits.

Queries: row r of a tile is query m0 + r of a head. Or, if a tile has all heads of a group, which share their keys, row
r is query m0 + r // HEADS of head h + r % HEADS; a box has HEADS lines for each query, and unused rows are undefined.

Tiles of keys are visited from the last to the first: all of a range, or those that a block mask lists
(`spec/attention/blocks.py`). Each of these has TILE keys, one or more tiles of BLOCK_KV. A tile of a range is its
number, one of a list its place in the list; `task.first` and `task.count` say which are the item's.

Tiles of queries are visited from the first to the last, one head of the group after the other: all of a range, or those
of a transposed block mask (`..block_masks`), as one or more tiles of BLOCK_Q.

Producer and consumers each read the list. They read an entry long before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....spec.attention.blocks import TILE, tiles_of
from ...compiler.backend import Members, Namespace, i32, i64, members, noun, u32, verb
from ...tile.boxes import Corner, box_tile
from ...tile.swizzle import Operand
from ..arguments import Variant
from ..tile_scheduler import ROWS_OF_A_HEAD, Rows, place_in_list, range_of, tile_after, tile_count
from .config import BLOCK_MASK, BOX, Sm90Config
from .dq_config import DqTiles


class Queries(Rows):
    """The verbs that load tiles of queries."""

    nbytes: int  # of a load
    at: Callable[..., Any]  # (stage) -> byte of shared memory where the tile begins
    load: Callable[..., None]  # (smem, stage, maps, task, b, full): by one thread


def queries_of(config: Sm90Config, tile: Operand) -> Queries:
    """The verbs for a tile at the beginning of shared memory."""
    return _of_a_group(config, tile) if config.heads > 1 else _of_a_head(tile)


def _of_a_head(tile: Operand) -> Queries:
    box = box_tile(tile, 0, 2)

    @verb
    def load(smem, stage, maps, task, b, full):
        box.load(smem, stage, maps.q, Corner(i32(task.q_first + task.m0), 0, (task.h, b)), full)

    row = ROWS_OF_A_HEAD
    return Queries(nbytes=tile.nbytes, at=box.at, load=load, query=row.query, head=row.head, there=row.there)


def _of_a_group(config: Sm90Config, tile: Operand) -> Queries:
    box, HEADS, ROWS_THERE = box_tile(tile, 0, 3), config.heads, config.queries * config.heads
    nbytes = ROWS_THERE * tile.span * (tile.width * tile.itemsize // tile.span)

    @verb
    def load(smem, stage, maps, task, b, full):
        group, token = i32(task.h // HEADS), i32(task.q_first + task.m0)
        box.load(smem, stage, maps.q, Corner(i32(0), 0, (token, group, b)), full)

    @verb
    def query(task, row):
        return i32(task.m0 + row // HEADS)

    @verb
    def head(task, row):
        return i32(task.h + row % HEADS)

    @verb
    def there(task, row):
        return (row < ROWS_THERE) & (task.m0 + row // HEADS < task.Sq)

    return Queries.from_locals(locals(), at=box.at)


@noun
def q_and_do(tiles: DqTiles) -> Members:
    """The verbs of the rows of a work item's queries."""
    q, do = box_tile(tiles.q, 0, 2), box_tile(tiles.do, tiles.do_at, 2)

    @verb
    def load(smem, stage, maps, task, b, full):
        """Start to load them into a stage; by one thread."""
        corner = Corner(i32(task.q_first + task.m0), 0, (task.h, b))
        q.load(smem, stage, maps.q, corner, full)
        do.load(smem, stage, maps.do, corner, full)

    return members(locals(), nbytes=tiles.q.nbytes + tiles.do.nbytes, q_at=q.at, do_at=do.at)


def box_of_group(config: Sm90Config) -> tuple[int, ...]:
    """Return the box of q as [B, groups, S, HEADS, D]."""
    return (1, 1, config.queries, config.heads, BOX)


class KvTile(NamedTuple):
    """A tile of keys."""

    n0: Any  # its first key
    full: Any  # 1 if the list says that mask_mod shows all pairs of the tile
    place: Any  # in the list


class KvTiles(Namespace):
    """The verbs that iterate over the tiles of keys that a tile of queries sees, last to first."""

    between: Callable[..., Any]  # (b, h, m0, n_first, n_end, options) -> first and count: tiles with some of these keys
    last: Callable[..., KvTile]  # (task, options): if there is none, one that must not be used
    before: Callable[..., KvTile]  # (tile, task, options): before the first, one that must not be used
    keys: Callable[..., Any]  # (task) -> first and end of the keys of all tiles
    listed: bool  # whether a block mask lists the tiles


def kv_tiles_of(block_q: int, block_kv: int, variant: Variant, *, split: bool = False) -> KvTiles:
    """The verbs of a kernel. If keys are split, block masks are not read."""
    names = variant.having.names
    return _kv_of_list(block_q, block_kv, names) if BLOCK_MASK in names and not split else _kv_of_range(block_kv)


def _kv_of_range(block_kv: int) -> KvTiles:
    BLOCK_KV, tiles = block_kv, range_of(block_kv)

    @verb
    def last(task, options):
        return KvTile(i32((task.first + i32(task.count)) * BLOCK_KV - BLOCK_KV), i32(0), i32(0))

    @verb
    def before(tile, task, options):
        return KvTile(i32(tile.n0 - BLOCK_KV), i32(0), i32(0))

    return KvTiles.from_locals(locals(), between=tiles.between, keys=tiles.keys, listed=False)


def _kv_of_list(block_q: int, block_kv: int, names: list[str]) -> KvTiles:
    BLOCK_KV, PARTS, INDEX = block_kv, TILE // block_kv, names.index(BLOCK_MASK)
    if TILE % block_kv or TILE % block_q:
        raise ValueError(
            f"tiles of {block_q} queries by {block_kv} keys do not divide a block mask's, {TILE} queries by {TILE} keys"
        )
    has_ranges, tells_all = "band" in names, "key_padding_mask" not in names

    @verb
    def row(b, h, m0, options):
        """Return where the list of a tile of queries begins, with its length."""
        steps = options[INDEX].lists.strides
        return i64(b) * steps[0] + i64(h) * steps[1] + i64(m0 // TILE) * steps[2]

    @verb
    def between(b, h, m0, n_first, n_end, options):
        start, entries = row(b, h, m0, options), options[INDEX].lists.data
        first, end = i32(0), i32(entries[start])
        if has_ranges:
            end = place_in_list(entries, start, end, i32((n_end + (TILE - 1)) // TILE))
            first = min(place_in_list(entries, start, end, i32(n_first // TILE)), end)
        return i32(first * PARTS), i32((end - first) * PARTS)

    @verb
    def at(place, task, options):
        """Return the tile at a place of the list. Place -1, the list's length, can be read, too."""
        start = row(task.b, task.h, task.m0, options)
        entry = i32(options[INDEX].lists.data[start + 1 + (place // PARTS)])
        n0 = i32(entry // 2 * TILE + place % PARTS * BLOCK_KV)
        return KvTile(n0, i32(entry % 2) if tells_all else i32(0), place)

    @verb
    def last(task, options):
        return at(i32(task.first + i32(task.count) - 1), task, options)

    @verb
    def before(tile, task, options):
        return at(i32(tile.place - 1), task, options)

    @verb
    def keys(task):
        return i32(0), task.Sk

    return KvTiles.from_locals(locals(), listed=True)


class QTile(NamedTuple):
    """A tile of queries of one head."""

    h: Any
    m0: Any  # its first query
    full: Any  # 1 if the list says that mask_mod shows all pairs of the tile


class QTiles(Namespace):
    """The verbs. work: `TiledWork`."""

    count: Callable[..., Any]  # (task, work) -> tiles of all heads
    first: Callable[..., QTile]  # (task, work); if there is no tile, one that must not be used
    after: Callable[..., QTile]  # (tile, i, end, task, work) -> the tile after that one, number i of `end`
    listed: bool  # whether a block mask lists the tiles


def q_tiles_of(block_q: int, variant: Variant | None) -> QTiles:
    """The verbs of a kernel. Without a variant: of a kernel that reads no block mask."""
    names = variant.having.names if variant else []
    return _q_of_list(block_q, names) if BLOCK_MASK in names else _q_of_range(block_q)


def _q_of_range(block_q: int) -> QTiles:
    BLOCK_Q = block_q

    @verb
    def count(task, work):
        return tile_count(task, work.extent.group, BLOCK_Q)

    @verb
    def first(task, work):
        return QTile(i32(task.h_kv * work.extent.group), i32(task.first), i32(0))

    @verb
    def after(tile, i, end, task, work):
        h, m0 = tile_after(task, tile.h, tile.m0, BLOCK_Q)
        return QTile(h, m0, i32(0))

    return QTiles.from_locals(locals(), listed=False)


def _q_of_list(block_q: int, names: list[str]) -> QTiles:
    BLOCK_Q, PARTS, INDEX = block_q, TILE // block_q, names.index(BLOCK_MASK)
    if TILE % block_q:
        raise ValueError(f"tiles of {block_q} queries do not divide a block mask's, of {TILE}")
    tells_all = "key_padding_mask" not in names

    @verb
    def row(task, options):
        """Return where the list of the tile of keys begins, with its length."""
        steps = options[INDEX].lists.strides
        return i64(task.b) * steps[0] + i64(task.h_kv) * steps[1] + i64(task.n0 // TILE) * steps[2]

    @verb
    def count(task, work):
        return u32(work.options[INDEX].lists.data[row(task, work.options)] * PARTS)

    @verb
    def at(i, task, work):
        options = work.options
        entry = u32(options[INDEX].lists.data[row(task, options) + 1 + i64(i // u32(PARTS))])
        number, q_tiles = u32(entry // u32(2)), u32(tiles_of(task.Sq))
        g = u32(number // q_tiles)
        m0 = i32(u32(number - u32(g * q_tiles)) * u32(TILE) + i % u32(PARTS) * u32(BLOCK_Q))
        return QTile(i32(task.h_kv * work.extent.group + i32(g)), m0, i32(entry % u32(2)) if tells_all else i32(0))

    @verb
    def first(task, work):
        return at(u32(0), task, work)

    @verb
    def after(tile, i, end, task, work):
        return at(min(u32(i + u32(1)), u32(end - u32(1))), task, work)

    return QTiles.from_locals(locals(), listed=True)
