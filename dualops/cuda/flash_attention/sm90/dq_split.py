"""dq of wide heads of float32 on Hopper's tensor cores, as three parts of bfloat16. Like dq.py, but split by products.

A block has 64 queries of one head, whose Q and dO take 96 KiB, then the next ones. One warpgroup
computes P and hands it over; the other computes dP, dS and dq:

    producer, one thread          warpgroup 0                          warpgroup 1
    for each work item            for each work item:                  for each work item:
    that it draws:                3  lse of two rows a thread; wait    3  delta of them; wait for Q and dO
    1  load Q and dO                 for Q and dO                      for each tile:
    2  for each tile of           for each tile:                       4  dP [64, BLOCK_KV] = dO @ V.T
       BLOCK_KV keys that some    4  scores [64, BLOCK_KV] = Q @ K.T   5  it gets P * slope; dS = P * slope *
       of the queries see, the    5  scores through the options;          (weight * dP - delta)
       last first: load K and V      -inf if masked;                   6  sums = dS @ K
                                     P = exp2(scores - lse)            7  acc [64, D] += sums
                                  6  P * slope is handed over          8  dq = acc * scale goes to memory

Warpgroup 1 has two of the three products of a tile. While its threads do arithmetic, the scores of the next tile are
computed. Threads add the sums of products, as tensor cores round toward zero.

Shared memory: `DqThirdsConfig.tiles`, 6 * (64 * (D + Dv) + BLOCK_KV * (stages * D + v_stages * Dv)) + 256 * BLOCK_KV
bytes. Registers of warpgroup 1: BLOCK_KV / 2 of dP, BLOCK_KV * 3 / 4 of dS in parts, D of acc and sums, and about 40.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, pointer, u8, u32, verb
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..options import chain_of
from ..score_gradients import d_scores_apart, gradient_of_queries
from ..tile_scheduler import tiled_work_type
from ..tiles import where_of
from .arguments import MAPS_TYPE, queries_to_type
from .config import factors, widths
from .dq import dq_loads
from .dq_config import DqThirdsConfig
from .output import dq_results
from .tile_scores import OwnRows, scores_of_queries


class ProbsSide(NamedTuple):
    """What the warpgroup that computes P multiplies with."""

    smem: Any
    at: Any  # smem, as the base of descriptors
    bars: Any
    scores: Any
    lse: Any  # of two rows
    base: Any  # of their exponents


class DqSide(NamedTuple):
    """What the warpgroup that computes dP, dS and dq multiplies with."""

    smem: Any
    at: Any
    bars: Any
    d_probs: Any
    packed: Any  # dS
    acc: Any
    delta: Any  # of two rows


@noun
def dq_split_tiles(config: DqThirdsConfig, variant: Variant) -> Members:
    """The verbs of both sides."""
    dtype, tiles = factors(variant.dtype), config.tiles(*widths(variant))
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    qk = warpgroup_mma(dtype, tiles.q, tiles.k, True, from_base=True)
    dov = warpgroup_mma(dtype, tiles.do, tiles.v, True, from_base=True)
    dsk = register_mma(dtype, tiles.k_right, True, from_base=True)
    box = warpgroup_exchange(tiles.p_at, qk.size, 1, exact=True)
    load, rows = dq_loads(config, variant, box), softmax_rows(variant.dtype, qk.size, dsk.size)
    score = fragment_scores(chain, config.block_kv, bent=chain.scores, others=variant.varlen)
    gradient = gradient_of_queries(chain, score, rows, qk.size, dsk.size)
    d_scores = d_scores_apart(score, box, dov.size)
    scores_of, ZERO = scores_of_queries(score, load, rows), i32(0)

    @verb
    def probs_side(smem, bars):
        """Return `ProbsSide`; once in a kernel."""
        return ProbsSide(smem, base_of(smem), bars, qk.fragment(), gradient.pair(), gradient.pair())

    @verb
    def begin_probs(side, task, piece, x):
        """Read lse of a work item, and wait for Q. Return where it begins."""
        gradient.read(side.lse, x.lse, task, ZERO)
        gradient.bases(side.base, side.lse)
        return load.queries.q_at(load.q.wait(side.bars.q, piece))

    @verb
    def probs_tile(own, side, task, q_at, tile, filling):
        """Compute P * slope of a tile, and hand it over. Return the next tile."""
        qk.start(side.scores, side.at, q_at, load.k.wait(side.bars.k, filling), ZERO)  # scores = Q @ K.T
        at = OwnRows(task, task.m0)
        known = scores_of.know(own, at, scores_of.ask(own, at, tile))
        qk.wait(side.scores)
        load.k.release(side.bars.k, filling)
        scores_of.mask(own, side.scores, known, filling)
        gradient.probs(side.scores, own.words, own.options, own.scale, known.where, side.base)
        box.put(side.smem, box.claim(side.bars.others, filling), side.scores)
        box.hand(side.bars.others, filling)
        return known.before

    @verb
    def dq_side(smem, bars):
        """Return `DqSide`; once in a kernel."""
        d_probs, acc, packed = dov.fragment(), dsk.fragment(), dsk.left()
        return DqSide(smem, base_of(smem), bars, d_probs, packed, acc, gradient.pair())

    @verb
    def begin_dq(side, task, piece, x):
        """Read delta of a work item, and wait for dO. Return where it begins, and the sums of products."""
        gradient.read(side.delta, x.delta, task, ZERO)
        return load.queries.do_at(load.q.wait(side.bars.q, piece)), dsk.sums(side.acc)

    @verb
    def dq_tile(side, task, item, tile, filling, options):
        """Add a tile to acc. item: of `begin_dq`. Return the next tile."""
        do_at, sums = item
        dov.start(side.d_probs, side.at, do_at, load.v.wait(side.bars.v, filling), ZERO)  # dP = dO @ V.T
        where, before = where_of(task, task.h, task.m0, tile.n0), load.visits.before(tile, task, options)
        dov.wait(side.d_probs)
        load.v.release(side.bars.v, filling)
        d_scores(side.d_probs, side.smem, box.take(side.bars.others, filling), options, where, side.delta)
        box.leave(side.bars.others, filling)
        rows.pack(side.packed, side.d_probs)
        dsk.add(sums, side.packed, side.at, load.k.at(filling), ZERO)  # K has arrived, as P has
        dsk.finish(side.acc, sums)  # acc [64, D] += dS @ K
        load.k.release(side.bars.k, filling)
        return before

    return members(locals(), load=load, own=scores_of.own, size=dsk.size)


@builds
def build_dq_split_f32(config: DqThirdsConfig, variant: Variant) -> Kernel:
    """flash_attention_dq_split_f32_sm90(maps, counter, to, x, work), with the records of `build_dq`."""
    role, tiles = roles(config.consumers), dq_split_tiles(config, variant)
    load = tiles.load
    results = dq_results(variant, load.visits.keys, tiles.size)

    @kernel(
        MAPS_TYPE,
        pointer(i64),
        queries_to_type(variant, ""),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_dq_split_f32_sm90(maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, warpgroup, extent, options = load.barriers(), my_warpgroup(), work.extent, work.options
        load.start(bars, maps, ())
        i, piece = u32(0), u32(0)  # numbers of K's and V's tiles, and of work items
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                load.produce(smem, maps, (), bars, counter, work)
        elif warpgroup == 0:
            role.consume()
            own, mine = tiles.own(smem, i32(0), work, i32(0)), tiles.probs_side(smem, bars)
            task, _ = load.items.take(bars.items, piece, extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                q_at = tiles.begin_probs(mine, task, piece, x)
                tile, end = load.visits.last(task, options), u32(i + task.count)
                while i != end:
                    tile = tiles.probs_tile(own, mine, task, q_at, tile, i)
                    i = load.k.next(i)
                load.q.skip(bars.q, piece)
                piece = u32(piece + 1)
                task, _ = load.items.take(bars.items, piece, extent)
        else:
            role.consume()
            side = tiles.dq_side(smem, bars)
            task, _ = load.items.take(bars.items, piece, extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                item = tiles.begin_dq(side, task, piece, x)
                tile, end = load.visits.last(task, options), u32(i + task.count)
                while i != end:
                    tile = tiles.dq_tile(side, task, item, tile, i, options)
                    i = load.k.next(i)
                task, _ = load.items.again(bars.items, piece, extent)  # it would hold registers
                load.q.release(bars.q, piece)
                results.store(smem, to, side.acc, task, i32(0), x, work)
                piece = u32(piece + 1)
                task, _ = load.items.take(bars.items, piece, extent)

    return flash_attention_dq_split_f32_sm90
