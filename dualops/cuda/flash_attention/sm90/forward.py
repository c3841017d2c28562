"""Attention forward on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 1; Shah et al. 2024 (arXiv:2407.08608).

A block has BLOCK_Q queries of one head, 64 for each consumer warpgroup, then the next ones. One thread of another
warpgroup loads.

    producer, one thread                       consumers
    for each work item that it draws:          for each work item:
    1  load Q                                  3  wait for Q
    2  for each tile of BLOCK_KV keys that     for each tile:
       some of the queries see, the last       4  scores [64, BLOCK_KV] = Q @ K.T, started early
       first: load K and V                     5  acc [64, Dv] += P @ V of the previous tile
                                               6  scores through the options; -inf if masked
                                               7  row_max, rescale; P = exp2(scores - row_max), row_sum
                                               8  after 5: acc *= rescale
                                               9  o = acc / row_sum, which is copied out of shared memory while the
                                                  next item begins

6 and 7 overlap 5 and the other warpgroups' products; warpgroups may take turns to start theirs. Inputs of options are
fetched a tile ahead, and so is the padding mask; a bias that is copied as boxes comes with K and V (`bias`). Dropout is
computed after 8, when P is packed; its factor and sinks are applied at 9. Scores never leave registers: accumulators,
packed in pairs, are the left factor of 5. If there is room, Q is in registers, too, and is read from shared memory once
(`held`). The producer loads the next item during 9.

With few queries, an item is a split of the keys, and the rows of a tile are the heads of a group for each query. o and
lse of a split go to memory as they are, or a block adds all splits of its queries in turn (`split_kv`).

Tiles that no query sees are not loaded, and masks are evaluated only in tiles that they cut (`visible_tiles`). A
probability of 0 times a NaN in V is NaN even if a mask hides it: a row that is not finite although its sum is finite is
recomputed (`nan_repair`).

Wide heads: an item has a slice of V's columns, and computes its own scores. If o has no room, it overwrites Q, each
warpgroup its own rows, after the last tile's products. Then Q's place is free when o has been copied out, so the next
item is loaded after 9.

float32 is three parts of bfloat16 for each number, side by side in rows three times as wide; P is split in registers,
and threads add the sums of each tile to acc (`float32`).

If scores are a curve of their products, as with softcap, 6 is skipped: 7 compares products, and turns each into its
probability at once (`fragment_probabilities`).

Shared memory: `Sm90Config.tiles`, 2 * (BLOCK_Q * (q_stages * D + Dv) + stages * BLOCK_KV * (D + Dv) + bias_stages *
BLOCK_Q * BLOCK_KV) bytes, BLOCK_Q * Dv less if o overwrites Q; Dv is that of a slice. Registers: BLOCK_KV / 2 scores
and their P in half as many, Dv / 2 of acc, D / 4 of Q if it is held, and about 40; for float32 three times as many of
P, and Dv / 2 more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, pointer, u8, u32, verb
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import settle, softmax_rows
from ...tile.split_bf16x3 import PARTS
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma
from ..arguments import Variant, inputs_type
from ..fragment_probabilities import are_curves, fragment_probabilities
from ..fragment_scores import fragment_scores
from ..tile_scheduler import tiled_work_type
from .arguments import FORWARD_MAPS_TYPE
from .bias import chains_of
from .config import Sm90Config, factors, padded
from .loads import KvLoads, kv_loads
from .output import ItemRows, results_of
from .products import register_a
from .schedule import is_static, items_of, turns
from .tile_scores import OwnRows, scores_of_queries
from .visible_tiles import kv_tiles_of, queries_of

# for more columns of acc, or with a static schedule, acc is rescaled only if a maximum grew: the kernel then takes 0.95
# to 0.97 of the time for D = 256, 0.99 for full attention with D = 128, but 1.03 if causal with S = 2048 (H200)
WIDE = 128


class Mine(NamedTuple):
    """What a thread multiplies with."""

    bars: Any
    base: Any  # of shared memory
    q: Any  # words of Q, if it is held
    scores: Any
    probs: Any  # packed
    acc: Any
    rows: Any  # `RowStatistics`
    factors: Any  # of exponents


class Item(NamedTuple):
    """A work item, as a thread has it."""

    at: Any  # `OwnRows`
    piece: Any  # its number
    q_at: Any  # where Q begins
    sums: Any  # of products, which become acc


def forward_loads(config: Sm90Config, variant: Variant) -> KvLoads:
    """Return what the kernel loads."""
    visits = kv_tiles_of(config.block_q, config.block_kv, variant, split=config.split)
    queries = queries_of(config, config.tiles(padded(variant.D), variant.Dv).q)
    return kv_loads(config, variant, queries, items_of(config, variant, visits), visits)


@noun
def forward_tiles(config: Sm90Config, variant: Variant, load: KvLoads) -> Members:
    """The verbs of a work item's tiles."""
    tiles, dtype = config.tiles(padded(variant.D), variant.Dv), factors(variant.dtype)
    chains = chains_of(variant, words=config.bias_stages > 0)
    chain, takers = chains.whole, config.consumers if config.turns else 1
    has_sinks, Q_FREE_EARLY = chain.sinks and not config.split, config.held and not config.o_over_q
    qk = register_a(dtype, tiles.q, tiles.k, held=config.held, parts=config.thirds, from_base=True)
    pv = register_mma(dtype, tiles.v, config.thirds, from_base=True)
    rows = softmax_rows(variant.dtype, qk.size, pv.size, threes=True, sinks=has_sinks, rest=config.split)
    scale_acc = rows.scale_changed if is_static(config, variant) or tiles.v.width > WIDE else rows.scale
    score = fragment_scores(
        chains.of_tile,
        config.block_kv,
        config.heads,
        products=are_curves(chain),
        word=load.bias.word,
        parts=PARTS if config.thirds else 1,
        others=variant.varlen,
    )
    scores_of = scores_of_queries(score, load, rows)
    softmax = fragment_probabilities(chain, rows, score, pv.size, sinks=has_sinks)

    @verb
    def mine(smem, bars, work):
        """Return `Mine`; once in a kernel."""
        scores, acc, probs, q_words = qk.fragment(), pv.fragment(), pv.left(), qk.words()
        statistics, exponents = softmax.statistics(), softmax.factors(work.options, work.scale)
        return Mine(bars, base_of(smem), q_words, scores, probs, acc, statistics, exponents)

    @verb
    def begin(mine, at, piece):
        """Wait for Q of a work item. Return `Item`."""
        softmax.start(mine.rows)
        return Item(at, piece, load.queries.at(load.q.wait(mine.bars.q, piece)), pv.sums(mine.acc))

    @verb
    def take_q(smem, mine, item, warpgroup):
        qk.take(mine.q, smem, item.q_at, warpgroup)

    @verb
    def add_values(mine, item, filling, adds):
        pv.add(item.sums, mine.probs, mine.base, load.v.wait(mine.bars.v, filling), adds)

    @verb
    def finish_values(mine, item, filling):
        pv.wait(item.sums)
        load.v.release(mine.bars.v, filling)
        pv.collect(mine.acc, item.sums)

    def tile_of(*, first: bool) -> Callable[..., Any]:
        """Return the verb (own, mine, item, pending, filling, adds) -> `Pending` of the next tile, for an item's first
        tile, or for any other.
        """
        FIRST, turn = first, turns(1 if first else takers)

        @verb
        def add_previous(mine, item, filling, adds):
            if not FIRST:
                add_values(mine, item, filling - 1, adds)

        @verb
        def finish_previous(mine, item, filling):
            if not FIRST:
                settle(mine.rows.row_sum[0] + mine.rows.row_sum[1])
                finish_values(mine, item, filling - 1)
                scale_acc(mine.acc, mine.rows.rescale)

        @verb
        def finish_scores(mine, item, filling):
            if FIRST:
                qk.wait(mine.scores)
                if Q_FREE_EARLY:
                    load.q.release(mine.bars.q, item.piece)
            else:
                qk.wait_but_one(mine.scores)
            load.k.release(mine.bars.k, filling)

        @verb
        def tile(own, mine, item, pending, filling, adds):
            known = scores_of.know(own, item.at, pending)
            k_at = load.k.wait(mine.bars.k, filling)
            turn.take(own.warpgroup)
            qk.start(mine.scores, mine.q, mine.base, item.q_at, k_at, own.warpgroup)  # scores = Q @ K.T
            add_previous(mine, item, filling, adds)  # acc [64, Dv] += P @ V, of the previous tile
            turn.give(own.warpgroup)
            finish_scores(mine, item, filling)
            scores_of.mask(own, mine.scores, known, filling)
            pending = scores_of.ask(own, item.at, known.before)
            softmax.exponentials(mine.scores, mine.rows, mine.factors, own.options, known.where)
            finish_previous(mine, item, filling)  # acc *= rescale
            scores_of.pack(own, mine.probs, mine.scores, known)
            return pending

        return tile

    return members(
        locals(),
        first=tile_of(first=True),  # verbs of `tile_of`
        later=tile_of(first=False),
        scores_of=scores_of,
        softmax=softmax,
        turn=turns(takers),
    )


@builds
def build_forward(config: Sm90Config, variant: Variant, with_lse: bool, stored: str) -> Kernel:
    """flash_attention_sm90(maps, bias_maps, counter, to, x, work): `ForwardMaps`, one map of a bias as boxes or none, a
    counter of 0 unless the schedule is static, `OutputTo`, `Inputs`, `TiledWork`.

    stored: how o gets to memory (`output`).
    """
    role, load = roles(config.consumers, most=config.most), forward_loads(config, variant)
    tiles = forward_tiles(config, variant, load)
    results = results_of(config, variant, load, with_lse, stored)

    @kernel(
        FORWARD_MAPS_TYPE,
        load.bias.maps_type,
        pointer(i64),
        results.to_type,
        inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_sm90(maps, bias_maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, warpgroup, extent, options = load.barriers(), my_warpgroup(), work.extent, work.options
        load.start(bars, maps, bias_maps)
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                load.produce(smem, maps, bias_maps, bars, counter, work)
        else:
            role.consume()
            own, mine = tiles.scores_of.own(smem, bars.others, work, warpgroup), tiles.mine(smem, bars, work)
            i, piece, row = u32(0), u32(0), i32(ROWS * warpgroup)  # numbers of K's and V's tiles, and of work items
            tiles.turn.begin(warpgroup)
            task, column = load.items.take(bars.items, piece, extent)
            while task.m0 >= 0:
                i, at = u32(shfl_idx_i32(i32(i), 0, FULL_WARP)), OwnRows(task, i32(task.m0 + row))
                pending = tiles.scores_of.ask(own, at, load.visits.last(task, options))
                item = tiles.begin(mine, at, piece)
                if task.count != u32(0):
                    end, adds = u32(i + task.count), i32(0)
                    tiles.take_q(smem, mine, item, warpgroup)
                    pending = tiles.first(own, mine, item, pending, i, adds)
                    i = load.k.next(i)
                    while i != end:
                        pending = tiles.later(own, mine, item, pending, i, adds)
                        adds, i = i32(1), load.k.next(i)
                    if not config.held and not config.o_over_q:
                        load.q.release(bars.q, piece)
                    tiles.add_values(mine, item, i - 1, adds)
                    sink = tiles.softmax.sink(options, task.h)
                    tiles.finish_values(mine, item, i - 1)
                else:
                    if not config.o_over_q:
                        load.q.skip(bars.q, piece)
                    sink = tiles.softmax.sink(options, task.h)
                    tiles.softmax.clear(mine.acc)
                found = tiles.softmax.divide(mine.acc, mine.rows, sink, mine.factors, options)  # lse
                results.store(smem, to, mine.acc, ItemRows(task, row, column), found, x, work)
                results.free()
                piece = u32(piece + 1)
                task, column = load.items.take(bars.items, piece, extent)
                if config.o_over_q:
                    load.q.release(bars.q, piece - 1)  # `take` synchronizes: no lane reads o any more
            results.finish()

    return flash_attention_sm90
