"""dq of attention on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, visiting keys like forward.

A block has BLOCK_Q queries of one head, 64 for each consumer warpgroup, then the next ones. One thread of another
warpgroup loads.

    producer, one thread                       consumers
    for each work item that it draws:          for each work item:
    1  load Q and dO                           3  lse and delta of two rows a thread; wait for Q and dO
    2  for each tile of BLOCK_KV keys that     for each tile:
       some of the queries see, the last       4  acc [64, D] += dS @ K of the previous tile
       first: load V and K, and the bias if    5  scores [64, BLOCK_KV] = Q @ K.T, overlapped with 4
       it is copied as boxes
                                               6  after 4: dP [64, BLOCK_KV] = dO @ V.T, overlapped with 5
                                               7  after 5, overlapped with 6: scores through the options; -inf if
                                                  masked; P = exp2(scores - lse) * slope
                                               8  after 6: dS = P * (weight * dP - delta)
                                               9  dq = acc * scale, which is copied out of shared memory while the
                                                  next item begins

dS is the left factor of 4 in registers, which are free when dP needs them. 7 overlaps 6 and the other warpgroups'
products; warpgroups may take turns to start theirs. K is read twice: by its rows for the scores, by its columns for dq.
A bias that is copied as boxes (`bias`) is read during 7; otherwise it is read from memory, score by score.

Tiles that no query sees are not loaded, and masks are evaluated only in tiles that they cut (`visible_tiles`). Masked
elements have P = 0, and 0 times a NaN in K or V is NaN: rows that are not finite are recomputed (`nan_repair`). A row
that sees nothing has lse = -inf, and gets zeros.

Shared memory: `DqConfig.tiles`, 2 * (BLOCK_Q * (q_stages * (D + Dv) + D) + stages * BLOCK_KV * (D + Dv)) bytes, BLOCK_Q
* D less if dq overwrites Q, and 2 * bias_stages * BLOCK_Q * BLOCK_KV for the bias. Registers: BLOCK_KV / 2 scores and
as many of dP, D / 2 of acc, and about 40. float32 is three parts of bfloat16, as in forward: tiles are three times as
wide, dS takes three times the registers, and the sums to add take D / 2 more.

Wide heads of float32 (`build_dq_split_f32`): Q and dO of 64 queries take 96 KiB, so a block has no more. One warpgroup
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

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import (
    Kernel,
    Members,
    Noun,
    builds,
    cuda,
    f32,
    i32,
    i64,
    kernel,
    members,
    noun,
    pointer,
    u8,
    u32,
    verb,
)
from ...tile.numbers import numbers
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..options import chain_of
from ..score_gradients import d_scores_apart, gradient_of_queries
from ..tile_scheduler import tiled_work_type, walk_by_queries
from ..tiles import where_of
from .arguments import MAPS_TYPE, queries_to_type
from .bias import chains_of
from .config import AnyDqConfig, DqConfig, DqThirdsConfig, factors, padded
from .loads import KvLoads, kv_loads
from .output import dq_results
from .schedule import turns, work_items
from .tile_scores import OwnRows, scores_of_queries
from .visible_tiles import kv_tiles_of, q_and_do


def dq_loads(config: AnyDqConfig, variant: Variant, others: Noun | None = None) -> KvLoads:
    """Return what dq's kernels load. others: as of `kv_loads`."""
    visits = kv_tiles_of(config.block_q, config.block_kv, variant)
    items = work_items(walk_by_queries(config, variant, visits.between, gradient=True), config.q_stages + 1)
    queries = q_and_do(config.tiles(padded(variant.D), padded(variant.Dv)))
    return kv_loads(config, variant, queries, items, visits, others)


class Mine(NamedTuple):
    """What a thread multiplies with."""

    bars: Any
    scores: Any
    d_probs: Any
    d_scores: Any  # packed
    acc: Any
    lse: Any  # of two rows
    base: Any  # of their exponents
    delta: Any


class Item(NamedTuple):
    """A work item, as a thread has it."""

    at: Any  # `OwnRows`
    q_at: Any
    do_at: Any
    sums: Any  # of products, which become acc


@noun
def dq_tiles(config: DqConfig, variant: Variant, load: KvLoads) -> Members:
    """The verbs of a work item's tiles."""
    chains = chains_of(variant, words=config.bias_stages > 0, gradient=True)
    tiles, dtype, thirds = config.tiles(padded(variant.D), padded(variant.Dv)), factors(variant.dtype), config.thirds
    qk, dov = warpgroup_mma(dtype, tiles.q, tiles.k, thirds), warpgroup_mma(dtype, tiles.do, tiles.v, thirds)
    dsk, takers, num = register_mma(dtype, tiles.k_right, thirds), config.consumers if config.turns else 1, numbers(f32)
    rows, bent = softmax_rows(variant.dtype, qk.size, dsk.size), chains.whole.scores
    score = fragment_scores(
        chains.of_tile, ROWS, config.block_kv, bent=bent, word=load.bias.word, others=variant.varlen
    )
    gradient = gradient_of_queries(chains.of_tile, score, rows, qk.size, dsk.size)
    scores_of = scores_of_queries(score, load, rows)

    @verb
    def mine(bars):
        """Return `Mine`; once in a kernel."""
        scores, d_probs, d_scores, acc = qk.fragment(), dov.fragment(), dsk.left(), dsk.fragment()
        return Mine(bars, scores, d_probs, d_scores, acc, gradient.pair(), gradient.pair(), gradient.pair())

    @verb
    def begin(mine, at, piece, row, x):
        """Read lse and delta of a work item, and wait for Q and dO. Return `Item`."""
        gradient.read(mine.lse, x.lse, at.task, row)
        gradient.read(mine.delta, x.delta, at.task, row)
        gradient.bases(mine.base, mine.lse)
        stage = load.q.wait(mine.bars.q, piece)
        return Item(at, load.queries.q_at(stage), load.queries.do_at(stage), dsk.sums(mine.acc))

    @verb
    def finish(own, mine, item, filling, adds):
        """Add the last tile's product to acc."""
        dsk.add(item.sums, mine.d_scores, own.smem, load.k.at(filling), adds)
        dsk.wait(item.sums)
        load.k.release(mine.bars.k, filling)
        dsk.collect(mine.acc, item.sums)

    @verb
    def clear(acc):
        for n in range(dsk.size):
            acc[n] = num.zero

    def tile_of(*, first: bool) -> Callable[..., Any]:
        """Return the verb (own, mine, item, pending, filling, adds) -> `Pending` of the next tile, for an item's first
        tile, or for any other.
        """
        FIRST, turn = first, turns(1 if first else takers)

        @verb
        def add_previous(own, mine, item, filling, adds):
            if not FIRST:
                dsk.add(item.sums, mine.d_scores, own.smem, load.k.at(filling - 1), adds)

        @verb
        def finish_previous(mine, item, filling):
            if not FIRST:
                dsk.wait_but_one(item.sums)
                load.k.release(mine.bars.k, filling - 1)
                dsk.collect(mine.acc, item.sums)

        @verb
        def probs(own, mine, known, filling):
            held = scores_of.hold(own, filling)
            scores_of.finish(own, mine.scores, known, held)
            gradient.probs(mine.scores, held, own.options, own.scale, known.where, mine.base)
            scores_of.release(own, filling)

        @verb
        def tile(own, mine, item, pending, filling, adds):
            known = scores_of.know(own, item.at, pending)
            k_at = load.k.wait(mine.bars.k, filling)
            turn.take(own.warpgroup)
            add_previous(own, mine, item, filling, adds)  # acc [64, D] += dS @ K, of the previous tile
            qk.start(mine.scores, own.smem, item.q_at, k_at, own.warpgroup)  # scores = Q @ K.T
            v_at = load.v.wait(mine.bars.v, filling)
            finish_previous(mine, item, filling)
            dov.start(mine.d_probs, own.smem, item.do_at, v_at, own.warpgroup)  # dP = dO @ V.T
            turn.give(own.warpgroup)
            pending = scores_of.ask(own, item.at, known.before)
            qk.wait_but_one(mine.scores)
            probs(own, mine, known, filling)  # scores through the options; P = exp2(scores - lse) * slope
            dov.wait(mine.d_probs)
            load.v.release(mine.bars.v, filling)
            gradient.d_scores(mine.scores, mine.d_probs, own.options, known.where, mine.delta)
            rows.pack(mine.d_scores, mine.scores)  # dS = P * (weight * dP - delta)
            return pending

        return tile

    return members(
        locals(),
        first=tile_of(first=True),  # verbs of `tile_of`
        later=tile_of(first=False),
        scores_of=scores_of,
        turn=turns(takers),
        size=dsk.size,
        at=tiles.dq_at,
        over=config.consumers if config.dq_over_q else 0,
    )


@builds
def build_dq(config: DqConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work): `Maps`, one map of a bias as boxes or none, a
    counter of 0, `QueriesTo`, `GradientInputs`, `TiledWork`.

    stored: how dq gets to memory (`output`).
    """
    role, load = roles(config.consumers, most=True), dq_loads(config, variant)
    tiles = dq_tiles(config, variant, load)
    results = dq_results(
        variant, load.visits.keys, tiles.size, tiles.at, stored if not config.thirds else "", tiles.over
    )

    @kernel(
        MAPS_TYPE,
        load.bias.maps_type,
        pointer(i64),
        queries_to_type(variant, stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, warpgroup, extent = load.barriers(), my_warpgroup(), work.extent
        load.start(bars, maps, bias_maps)
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                load.produce(smem, maps, bias_maps, bars, counter, work)
        else:
            role.consume()
            own, mine = tiles.scores_of.own(smem, bars.others, work, warpgroup), tiles.mine(bars)
            i, piece, row = u32(0), u32(0), i32(ROWS * warpgroup)  # numbers of K's and V's tiles, and of work items
            tiles.turn.begin(warpgroup)
            task, _ = load.items.take(bars.items, piece, extent)
            while task.m0 >= 0:
                i, at = u32(shfl_idx_i32(i32(i), 0, FULL_WARP)), OwnRows(task, i32(task.m0 + row))
                pending = tiles.scores_of.ask(own, at, load.visits.last(task, work.options))
                item = tiles.begin(mine, at, piece, row, x)
                if config.zeroed:
                    tiles.clear(mine.acc)
                if task.count != u32(0):
                    end, adds = u32(i + task.count), i32(config.zeroed)
                    pending = tiles.first(own, mine, item, pending, i, adds)
                    i = load.k.next(i)
                    while i != end:
                        pending = tiles.later(own, mine, item, pending, i, adds)
                        adds, i = i32(1), load.k.next(i)
                    task, _ = load.items.again(bars.items, piece, extent)  # it would hold registers
                    if not config.dq_over_q:
                        load.q.release(bars.q, piece)
                    tiles.finish(own, mine, item, i - 1, adds)
                else:
                    if not config.dq_over_q:
                        load.q.skip(bars.q, piece)
                    if not config.zeroed:
                        tiles.clear(mine.acc)
                results.store(smem, to, mine.acc, task, row, x, work)
                if config.dq_over_q:
                    results.free()
                piece = u32(piece + 1)
                task, _ = load.items.take(bars.items, piece, extent)
                if config.dq_over_q:
                    load.q.release(bars.q, piece - 1)  # `take` synchronizes: no lane reads dq any more
            if not config.dq_over_q:
                results.finish()

    return flash_attention_dq_sm90


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
    dtype, tiles = factors(variant.dtype), config.tiles(padded(variant.D), padded(variant.Dv))
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    qk = warpgroup_mma(dtype, tiles.q, tiles.k, True, from_base=True)
    dov = warpgroup_mma(dtype, tiles.do, tiles.v, True, from_base=True)
    dsk = register_mma(dtype, tiles.k_right, True, from_base=True)
    box = warpgroup_exchange(tiles.p_at, qk.size, 1, exact=True)
    load, rows = dq_loads(config, variant, box), softmax_rows(variant.dtype, qk.size, dsk.size)
    score = fragment_scores(chain, ROWS, config.block_kv, bent=chain.scores, others=variant.varlen)
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
