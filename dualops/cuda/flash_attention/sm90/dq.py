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

Masked tiles, and rows that are not finite: as in `forward`. A row that sees nothing has lse = -inf, and gets zeros.

Shared memory: `DqConfig.tiles`, 2 * (BLOCK_Q * (q_stages * (D + Dv) + D) + stages * BLOCK_KV * (D + Dv)) bytes, BLOCK_Q
* D less if dq overwrites Q, and 2 * bias_stages * BLOCK_Q * BLOCK_KV for the bias. Registers: BLOCK_KV / 2 scores and
as many of dP, D / 2 of acc, and about 40. float32 is three parts of bfloat16, as in forward: tiles are three times as
wide, dS takes three times the registers, and the sums to add take D / 2 more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, pointer, u8, u32, verb
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import Handover
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..score_gradients import gradient_of_queries
from ..tile_scheduler import tiled_work_type, walk_by_queries
from .arguments import MAPS_TYPE, queries_to_type
from .bias import chains_of
from .config import factors, widths
from .dq_config import AnyDqConfig, DqConfig
from .loads import KvLoads, kv_loads
from .output import dq_results
from .schedule import turns, work_items
from .tile_scores import OwnRows, scores_of_queries
from .visible_tiles import kv_tiles_of, q_and_do


def dq_loads(config: AnyDqConfig, variant: Variant, others: Handover | None = None) -> KvLoads:
    """Return what dq's kernels load. others: as of `kv_loads`."""
    visits = kv_tiles_of(config.block_q, config.block_kv, variant)
    items = work_items(walk_by_queries(config, variant, visits.between, gradient=True), config.q_stages + 1)
    queries = q_and_do(config.tiles(*widths(variant)))
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
    tiles, dtype, thirds = config.tiles(*widths(variant)), factors(variant.dtype), config.thirds
    qk, dov = warpgroup_mma(dtype, tiles.q, tiles.k, thirds), warpgroup_mma(dtype, tiles.do, tiles.v, thirds)
    dsk, takers = register_mma(dtype, tiles.k_right, thirds), config.consumers if config.turns else 1
    rows, bent = softmax_rows(variant.dtype, qk.size, dsk.size), chains.whole.scores
    score = fragment_scores(chains.of_tile, config.block_kv, bent=bent, word=load.bias.word, others=variant.varlen)
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
        clear=gradient.clear,
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
