"""How the fused kernel's blocks add dq in memory, in a fixed order; and rows of dq from the sums.

`dq_queue`: warps fill places of shared memory, and one thread empties them (`tile.pipeline.places`). Each sum has a
flag, which counts the blocks that have added. Of the blocks with keys that the tile's queries see, number r waits until
the flag is r, adds by a bulk copy, waits until that is written, and makes the flag r + 1. The first block stores, so
that only flags need clearing. Readers, which may be a grid that overlaps this one, wait until all blocks have added.

`TileOrder`: the order in which blocks visit tiles of queries, so that they wait little.

`build_dq_convert`: a block has 64 queries of a tile of one head. A thread reads the numbers that a product would have
left in its registers. As in `dq`, rows that are not finite are recomputed (`nan_repair`), and all are scaled, rounded
and stored. A tile that no block adds to is zero. Blocks begin while the fused kernel still runs, where it leaves room,
in the order in which it finishes its tiles. The last block ends after the fused kernel.

Shared memory of `build_dq_convert`: 2 * 64 * D bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, i64, kernel, members, noun, u8, u32, verb
from ...ptx.async_copy import (
    cp_async_bulk_commit_group,
    cp_async_bulk_store,
    cp_async_bulk_wait_group,
    cp_reduce_async_bulk_add_f32,
    fence_proxy_async,
)
from ...ptx.memory import atom_add_i64, st_release_i64, wait_for_i64
from ...ptx.warp import griddepcontrol_wait
from ...tile.numbers import numbers
from ...tile.pipeline import arrivals, places
from ...tile.products import opaque_i32
from ...tile.storage import access
from ...tile.warpgroup import ROWS
from ..arguments import Variant, gradient_inputs_type
from ..options import chain_of
from ..tile_scheduler import packed_tiles, range_of, tiled_work_type, walk_by_queries
from .arguments import SUMS_TYPE, queries_to_type
from .config import BOX, padded, widths
from .dkv_config import CONSUMERS, FRAGMENT, FRAGMENT_BYTES, FusedConfig
from .output import dq_results
from .visible_tiles import QTiles, q_tiles_of


@verb
def draw(counter):
    """Return the number of a work item, from 0 on. Blocks with smaller numbers have started, so waiting for them is
    safe.
    """
    return i32(atom_add_i64(counter, i64(0), i64(1)))


class OrderedTile(NamedTuple):
    """A tile of queries of one head, as `QTile`."""

    h: Any
    m0: Any  # its first query
    last: Any  # first query of each head's last tile


class TileOrder(QTiles):
    """The order in which a block of keys visits the tiles of queries of each head that see some of them."""

    rank: Callable[..., Any]  # (task, m0, options) -> how many blocks visit this one earlier


def tile_order(config: FusedConfig, variant: Variant) -> TileOrder:
    """The verbs of the fused kernel's order."""
    return _from_the_first(config, variant) if config.ascends else _from_the_last(config, variant)


def _from_the_last(config: FusedConfig, variant: Variant) -> TileOrder:
    """From the last tile on, for blocks of ascending keys: each starts one tile after the previous block. With a
    window, the queries of a block's last tile see keys of no earlier block, or of one, except near the last query.
    """
    BLOCK_Q, BLOCK_KV = config.block_q, config.block_kv
    chain = chain_of(variant.having, variant.dtype, gradient=True)

    @verb
    def first(task, work):
        last = i32(u32(max(i32(task.end), i32(1)) - 1) // u32(BLOCK_Q) * u32(BLOCK_Q))
        return OrderedTile(i32(task.h_kv * work.extent.group), last, last)

    @verb
    def after(tile, i, end, task, work):
        """Return the tile before this one: of the same head, or the last one of the next head."""
        h, m0, last = tile.h, i32(tile.m0 - BLOCK_Q), tile.last
        h, m0 = (i32(h), m0) if m0 >= task.first else (i32(h + 1), i32(last))
        return OrderedTile(h, m0, last)

    @verb
    def rank(task, m0, options):
        n_first, _ = chain.key_range(options, m0, min(i32(m0 + BLOCK_Q), task.Sq), task.offset, task.Sk)
        return i32(u32(task.n0) // u32(BLOCK_KV)) - i32(u32(n_first) // u32(BLOCK_KV))

    return TileOrder.from_locals(locals(), count=q_tiles_of(BLOCK_Q, None).count, listed=False)


def _from_the_first(config: FusedConfig, variant: Variant) -> TileOrder:
    """From the first tile on, for blocks of descending keys. With a causal mask, the queries of a block's first tile
    see keys of no later block, or of one, except near the first query: so hardly a block waits before its first tiles.
    """
    BLOCK_Q, BLOCK_KV = config.block_q, config.block_kv
    chain, ascending = chain_of(variant.having, variant.dtype, gradient=True), q_tiles_of(BLOCK_Q, None)

    @verb
    def rank(task, m0, options):
        _, n_end = chain.key_range(options, m0, min(i32(m0 + BLOCK_Q), task.Sq), task.offset, task.Sk)
        return i32(u32(i32(n_end) - 1) // u32(BLOCK_KV)) - i32(u32(task.n0) // u32(BLOCK_KV))

    return TileOrder(**ascending.members(), rank=rank)


def place_of_sum(block_q: int, varlen: bool) -> Callable[..., Any]:
    """Return the verb (task, H, h, tile, q_tiles) -> which sum belongs to this tile of head h's queries.

    q_tiles: of a head, in a batch or, for varlen, in all sequences (`packed_count`).
    """
    tiles = packed_tiles(block_q)

    @verb
    def place(task, H, h, tile, q_tiles):
        if varlen:
            return i64(h) * q_tiles + i32(tiles.after(task.q_first, task.b) + tile)
        return i64(task.b * H + h) * q_tiles + tile

    return place


@noun
def dq_queue(config: FusedConfig, variant: Variant, order: TileOrder) -> Members:
    """The verbs of dq on its way from registers to memory."""
    num, PLACE, BLOCK_Q, SIZE = numbers(f32), CONSUMERS * FRAGMENT, config.block_q, FRAGMENT // 128
    box, tiles = places(config.dq_places, arrivals(config.warps), 1), config.tiles(*widths(variant))
    DQ_AT = tiles.dq_at // 4  # where the places begin, in floats
    NBYTES, place_of = u32(CONSUMERS * FRAGMENT_BYTES), place_of_sum(BLOCK_Q, variant.varlen)

    @verb
    def put(floats, bars, i, values):
        """Put my part in a place, in the layout of registers: four numbers of a thread next to those of its
        neighbour.
        """
        tid = u32(cuda.threadIdx.x)
        mine = i32(tid // u32(128) * u32(FRAGMENT) + u32(4) * (tid % u32(128)))
        place = i32(box.claim(bars, i) * PLACE + mine)
        for n in range(0, SIZE, 4):
            num.store_vector(floats, i32(DQ_AT + place + 128 * n), values, n)
        fence_proxy_async()  # copies read it
        box.hand(bars, i)

    @verb
    def _add_in_order(sums, tile, floats, at, rank):
        """Add a place's numbers, from index `at` on, to the sum of a tile, after `rank` other blocks."""
        wait_for_i64(sums.flags, tile + 1, i64(rank))
        if rank == 0:
            cp_async_bulk_store(sums.data, tile * PLACE, floats, at, NBYTES)
        else:
            cp_reduce_async_bulk_add_f32(sums.data, tile * PLACE, floats, at, NBYTES)
        cp_async_bulk_commit_group()
        cp_async_bulk_wait_group(0)
        st_release_i64(sums.flags, tile + 1, i64(rank + 1))

    @verb
    def add(floats, bars, sums, task, work):
        """Add dq of all tiles to their sums in memory; by one thread. sums: `Sums`."""
        i, end, tile = u32(0), order.count(task, work), order.first(task, work)
        while i != end:
            number = i32(place_of(task, work.extent.H, tile.h, i32(u32(tile.m0) // u32(BLOCK_Q)), sums.tiles))
            at = i32(DQ_AT + box.take(bars, i) * PLACE)
            _add_in_order(sums, i64(number), floats, at, order.rank(task, tile.m0, work.options))
            box.free(bars, i)
            tile = order.after(tile, i, end, task, work)
            i = u32(opaque_i32(i + 1))

    return members(locals(), barriers=box.barriers, init=box.init)


THREADS = 128


@verb
def _all_keys(task):
    return i32(0), task.Sk


@builds
def build_dq_convert(config: FusedConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_finish(sums, to, x, work): `Sums`, `QueriesTo`, `GradientInputs`, `TiledWork`.

    stored: how dq gets to memory (`output`).
    """
    SIZE, PARTS, FRAGMENTS = padded(variant.D) // 2, config.parts, padded(variant.D) // BOX * FRAGMENT
    source, place_of, NONE = access("float32", True, once=True), place_of_sum(config.block_q, variant.varlen), f32(0)
    tiles, results = range_of(config.block_kv), dq_results(variant, _all_keys, SIZE, 0, stored, 1)

    @verb
    def adding(b, h, m0, n_first, n_end, options):
        """Return first and count of the blocks that add to a tile of queries: none if no query of it sees a key."""
        first, count = tiles.between(b, h, m0, n_first, n_end, options)
        return first, count if n_first < n_end else i32(0)

    walk = walk_by_queries(config, variant, adding, gradient=True, first_first=config.ascends, packed=variant.varlen)

    @verb
    def read(sums, task, part, work):
        """Wait until all blocks have added. Return my numbers of a part, zeros if there is no block."""
        acc = cuda.local.array(SIZE, f32)
        tile = place_of(task, work.extent.H, task.h, i32(task.m0 // config.block_q), sums.tiles)
        at = (tile * PARTS + part) * FRAGMENTS + 4 * cuda.threadIdx.x
        wait_for_i64(sums.flags, 1 + tile, i64(task.count))
        for n in range(0, SIZE, 4):
            source.load(acc, n, sums.data, at + 128 * n, task.count != 0, NONE)
        return acc

    @kernel(
        SUMS_TYPE,
        queries_to_type(variant, stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=THREADS,
    )
    def flash_attention_dq_finish(sums, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        task = walk.task(cuda.blockIdx.x // config.parts, work)
        part = i32(cuda.blockIdx.x % config.parts)
        if not variant.varlen or task.m0 < task.Sq:
            results.store(smem, to, read(sums, task, part, work), task, i32(ROWS * part), x, work)
            results.finish()
        if cuda.blockIdx.x == cuda.gridDim.x - 1:
            griddepcontrol_wait()

    return flash_attention_dq_finish
