"""Attention forward by mma.sync, on Ampere and later. Dao 2023, arXiv:2307.08691, Alg. 1.

A block has BLOCK_Q queries of one head, a warp 16 of them, a strip. Two stages of shared memory hold BLOCK_KV keys
and their values each: one is filled (cp.async) while the other is multiplied.

    1  start the copies of Q and of the last tile of keys that some of the queries see
    2  a warp's rows of Q to registers; of wide heads they are read again for each tile
    3  for each tile, the last first:
    4      start the copies of the tile before it, to the other stage
    5      scores [16, BLOCK_KV] = Q @ K.T
    6      scores through the options; -inf if masked
    7      row_max, rescale; P = exp2(scores - row_max), row_sum, acc *= rescale
    8      acc [16, Dv] += P @ V
    9      wait for the next tile, all threads
   10  o = acc / row_sum, 16 rows of a warp at a time through shared memory

One barrier a tile: after it all threads have read this tile, and the next one has arrived. Scores never leave
registers: packed in pairs, accumulators are the left factor of the next product.

A tile that no query sees is not loaded, and masks are applied only in tiles that they cut. A probability of 0 times a
NaN in V is a NaN even if a mask hides it: a row that is not finite although its sum is finite is recomputed
(`nan_repair`). Of varlen, a tile ends where its sequence does.

Shared memory: `Sm80Config.tiles`, 2 * (BLOCK_Q * D + 2 * BLOCK_KV * (D + Dv)) bytes. Registers: BLOCK_KV / 2 scores and
their P in half as many, Dv / 2 of acc, D / 4 of Q where it is held, and about 60.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, i64, kernel, noun, u32, verb
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.numbers import numbers
from ...tile.products import opaque_f32, recomputed_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.storage import storage
from ...tile.strips import strip_ab, strip_abt
from ..arguments import Variant, array_type, inputs_type, statistic_type
from ..fragment_scores import fragment_scores, my_row, store_lse
from ..nan_repair import nan_repair
from ..options import chain_of
from ..tile_scheduler import ROWS_OF_A_HEAD, range_of, tiled_work_type, walk_by_queries
from ..tiles import where_of
from .config import MOST_HELD, ROWS, Sm80Config, Tiles
from .rows import KeyHead, Vectors, kv_copies, output_of


class Mine(NamedTuple):
    """What a thread multiplies with; pairs of numbers of its rows."""

    scores: Any
    acc: Any
    probs: Any  # packed
    row_max: Any  # in the end lse
    new_max: Any
    row_sum: Any
    rescale: Any
    base: Any  # of exponents
    factor: Any
    seed: Any  # of dropout


@noun
def forward_tiles(config: Sm80Config, variant: Variant, tile: Tiles, with_lse: bool, whole: bool) -> Members:
    """The verbs of a block's tiles of keys. whole: o is stored 16 bytes at a time."""
    num, dtype, chain = numbers(f32), variant.dtype, chain_of(variant.having, variant.dtype)
    qk = strip_abt(dtype, tile.q, tile.k, tile.q_boxes, held=variant.D <= MOST_HELD)
    pv = strip_ab(dtype, tile.v, tile.v_boxes)
    rows = softmax_rows(dtype, qk.size, pv.size, sinks=chain.sinks)
    score = fragment_scores(chain, config.block_kv, apart=False)
    keys = range_of(config.block_kv).keys
    nan_rows = nan_repair(chain, variant, ROWS_OF_A_HEAD, keys, pv.size, passes=False)
    output = output_of(dtype, variant.Dv, tile.v_boxes, whole)

    @verb
    def row(tid):
        """Return the first row of a thread's four warps."""
        return i32(u32(tid) // u32(128) * u32(ROWS))

    @verb
    def mine(work):
        """Return `Mine`; once in a kernel."""
        seed = score.seed(work.options)
        scores, acc, probs = qk.fragment(), pv.fragment(), pv.left()
        row_max, new_max, row_sum, rescale = rows.pair(), rows.pair(), rows.pair(), rows.pair()
        base, factor = rows.pair(), rows.pair()
        rows.start(row_max, row_sum)
        return Mine(scores, acc, probs, row_max, new_max, row_sum, rescale, base, factor, seed)

    @verb
    def hold(smem, my_rows):
        """Return where my warp's rows of Q begin, and what a thread holds of them, once Q has arrived."""
        q_place = qk.place(my_rows, 0)
        return q_place, qk.hold(smem, q_place)

    @verb
    def add(mine, q, smem, stage, where, work):
        """Add a tile to acc. q: of `hold`."""
        q_place, q_frag = q
        qk.multiply(mine.scores, q_frag, smem, q_place, i32(tile.k_at + stage * tile.k_size))  # scores = Q @ K.T
        stay = score.keeps(work.options, where, mine.seed)
        score.finish(mine.scores, work.options, work.scale, where)
        rows.new_max(mine.new_max, mine.scores, mine.row_max)
        units = rows.units(score.units(opaque_f32(work.scale)))  # each time: registers are few
        rows.exponents(mine.base, mine.factor, mine.new_max, units)
        rows.rescale_of(mine.rescale, mine.row_max, mine.new_max, mine.base, mine.factor)
        rows.exp2(mine.scores, mine.base, mine.factor)
        rows.add(mine.row_sum, mine.scores, mine.rescale)
        score.keep(mine.scores, stay)
        rows.scale(mine.acc, mine.rescale)
        pv.put(mine.probs, mine.scores)
        pv.add(mine.acc, mine.probs, smem, i32(tile.v_at + stage * tile.v_size))  # acc [16, Dv] += P @ V

    @verb
    def store(mine, to, x, task, row, work):
        """Store o and lse. to: both arrays. row: the first of the four warps."""
        rows.total(mine.row_sum)
        sink = num.minus_inf
        if chain.sinks:
            sink = chain.sink(work.options, i64(task.h))
        units = rows.units(score.units(opaque_f32(work.scale)))
        rows.close(mine.row_max, mine.row_sum, mine.rescale, sink, units)  # row_max becomes lse
        if chain.sinks:
            rows.scale(mine.acc, mine.rescale)
        rows.divide(mine.acc, mine.row_sum, score.growth(work.options))
        o, lse = to
        upper, lower = mine.row_max[0], mine.row_max[1]
        if with_lse:
            store_lse(lse, task, i32(row + my_row()), upper)
            store_lse(lse, task, i32(row + my_row() + 8), lower)
        nan_rows.repair(mine.acc, (upper, lower), x, task, row, i32(0), work)
        output.store(cuda.shared.array(0, f32, alignment=128), o, mine.acc, task, row)

    return locals()


@builds
def build_forward(config: Sm80Config, variant: Variant, with_lse: bool, vectors: Vectors) -> Kernel:
    """flash_attention_sm80(o, lse, x, work). x: `Inputs`. work: `TiledWork`.

    vectors: elements of copies of q, k and v, and of stores of o.
    """
    mem, walk = storage(variant.dtype), walk_by_queries(config, variant)
    tile = config.tiles(variant.D, variant.Dv)
    copies = kv_copies(config, variant, tile, vectors)
    tiles = forward_tiles(config, variant, tile, with_lse, vectors.o > 1)

    @kernel(
        array_type(variant),
        statistic_type(variant),
        inputs_type(variant),
        tiled_work_type(variant),
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def flash_attention_sm80(o, lse, x, work):
        smem = cuda.shared.array(0, mem.element, alignment=128)
        task = walk.task(i32(cuda.blockIdx.x), work)
        if task.m0 >= task.Sq:
            return
        count, row = task.count, tiles.row(u32(cuda.threadIdx.x))
        my_rows = i32(row + i32(u32(cuda.threadIdx.x) % u32(128) // u32(32) * u32(16)))
        n0 = i32((task.first + i32(count)) * config.block_kv - config.block_kv)
        copies.queries(smem, x, task)
        if count != u32(0):
            copies.keys(smem, x, task, KeyHead(task.b, task.h_kv), n0, (tile.k_at, tile.v_at))
        cp_async_commit()

        mine = tiles.mine(work)
        cp_async_wait_group(0)
        cuda.syncthreads()
        q = tiles.hold(smem, my_rows)
        i = u32(0)
        while i != count:
            stage, n1 = i32(i % u32(2)), i32(n0 - config.block_kv)
            if i + u32(1) != count:
                # no register keeps values computed from them
                head = KeyHead(recomputed_i32(task.b), recomputed_i32(task.h_kv))
                coming = i32(1 - stage)
                places = tile.k_at + coming * tile.k_size, tile.v_at + coming * tile.v_size
                copies.keys(smem, x, task, head, n1, places)
                cp_async_commit()
            tiles.add(mine, q, smem, stage, where_of(task, task.h, i32(task.m0 + row), n0), work)
            cp_async_wait_group(0)
            cuda.syncthreads()
            i, n0 = u32(i + u32(1)), n1
        if count == u32(0):
            cuda.syncthreads()  # rows of o overwrite Q

        # computed again: no register kept them until now
        task = walk.task(recomputed_i32(cuda.blockIdx.x), work)
        tiles.store(mine, (o, lse), x, task, tiles.row(recomputed_i32(cuda.threadIdx.x)), work)

    return flash_attention_sm80
