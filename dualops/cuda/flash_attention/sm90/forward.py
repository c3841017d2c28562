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

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, types, u8, u32, verb
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import settle, softmax_rows
from ...tile.split_bf16x3 import PARTS
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma
from ..arguments import Variant, array_type, inputs_type, statistic_type
from ..fragment_probabilities import RowStatistics, are_curves, fragment_probabilities
from ..fragment_scores import fragment_scores, my_row
from ..nan_repair import nan_repair
from ..options import chain_of
from ..tile_scheduler import tiled_work_type
from ..tiles import Where
from .arguments import FORWARD_MAPS_TYPE, OutputTo, map_type
from .bias import bias_stages, in_words
from .config import Sm90Config, factors, padded
from .output import output_of
from .products import register_a
from .schedule import (
    SIZE,
    following_of,
    get_of,
    is_static,
    put,
    put_end,
    slices_of,
    turns,
    walk_of,
    word_of,
    work_queue,
)
from .split_kv import PARTS_TYPE, SplitLse, serial_of
from .visible_tiles import kv_tiles_of, queries_of

# for more columns of acc, or with a static schedule, acc is rescaled only if a maximum grew: the kernel then takes 0.95
# to 0.97 of the time for D = 256, 0.99 for full attention with D = 128, but 1.03 if causal with S = 2048 (H200)
WIDE = 128


@builds
def build_forward(config: Sm90Config, variant: Variant, with_lse: bool, stored: str) -> Kernel:
    """flash_attention_sm90(maps, bias_maps, counter, to, x, work): `ForwardMaps`, one map of a bias as boxes or none, a
    counter of 0 unless the schedule is static, `OutputTo`, `Inputs`, `TiledWork`.

    stored: how o gets to memory (`output`).
    """
    D, BLOCK_KV, O_OVER_Q = padded(variant.D), config.block_kv, config.o_over_q
    num = numbers(f32)
    chain, role = chain_of(variant.having, variant.dtype), roles(config.consumers, most=config.most)
    tile_chain = chain_of(in_words(variant.having), variant.dtype) if config.bias_stages else chain
    warps, tiles = 4 * config.consumers, config.tiles(D, variant.Dv)
    alike = is_static(config, variant)
    ticket = work_queue(config.q_stages + 1, SIZE, alike, word_of(config, variant))
    queries = queries_of(config, tiles.q)
    k_tile = box_tile(tiles.k, tiles.k_at, 2)
    v_tile = box_tile(tiles.v, tiles.v_at, 2)
    q_pipe = pipeline(config.q_stages, queries.nbytes, warps)
    k_pipe, v_pipe = pipeline(config.stages, tiles.k.nbytes, warps), pipeline(config.stages, tiles.v.nbytes, warps)
    qk = register_a(factors(variant.dtype), tiles.q, tiles.k, held=config.held, parts=config.thirds, from_base=True)
    Q_FREE_EARLY = config.held and not O_OVER_Q
    pv = register_mma(factors(variant.dtype), tiles.v, config.thirds, from_base=True)
    has_sinks = chain.sinks and not config.split
    rows = softmax_rows(variant.dtype, qk.size, pv.size, threes=True, sinks=has_sinks, rest=config.split)
    bias = bias_stages(variant, config.bias, tiles.bias_at, config.bias_stages, config.consumers)
    score = fragment_scores(
        tile_chain,
        ROWS,
        BLOCK_KV,
        config.heads,
        products=are_curves(chain),
        word=bias.word,
        parts=PARTS if config.thirds else 1,
        others=variant.varlen,
    )
    FETCHES, words_of_options = (False, bias.words) if config.bias_stages else (score.fetches, score.held)
    probability = fragment_probabilities(chain, rows, score)
    scale_acc = rows.scale_changed if alike or tiles.v.width > WIDE else rows.scale
    turn = turns(config.consumers if config.turns else 1)
    visits = kv_tiles_of(config.block_q, BLOCK_KV, variant, score, split=config.split)
    walk, following = walk_of(config, variant, chain, visits), following_of(config, chain)
    get = get_of(varlen=variant.varlen, split=config.split, sliced=config.slices > 1)
    hidden = nan_repair(chain, variant, queries, visits.keys, pv.size, passes=variant.varlen)
    output = output_of(config, variant, queries, stored)
    serial, stores_lse = serial_of(config, variant, chain, queries, with_lse), with_lse and not config.serial
    piece_of = slices_of(config.slices, tiles.v.width)
    in_parts = config.split and not config.serial
    results = [PARTS_TYPE] * 2 if in_parts else [array_type(variant), statistic_type(variant)]
    to_type = types.NamedTuple((map_type(stored), *results, serial.kept_type), OutputTo)
    x_type = inputs_type(variant)

    @verb
    def where_of_next(where, tile):
        """Return where the next tile is; after the last, with key 0."""
        return Where(where.b, where.h, where.m0, max(tile.n0, i32(0)), where.Sq, where.Sk, where.offset)

    @kernel(
        FORWARD_MAPS_TYPE, bias.maps_type, pointer(i64), to_type, x_type, tiled_work_type(variant), threads=role.threads
    )
    def flash_attention_sm90(maps, bias_maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_bars, slots = q_pipe.barriers(), k_pipe.barriers(), v_pipe.barriers(), ticket.slots()
        bias_bars = bias.barriers()
        extent, scale, options = work.extent, work.scale, work.options
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_pipe.init(k_bars)
            v_pipe.init(v_bars)
            bias.init(bias_bars)
            ticket.init(slots)
        prefetch_maps(maps, 1)
        bias.prefetch(bias_maps)
        q_pipe.start()
        i, piece = u32(0), u32(0)  # numbers of K's and V's tiles, and of work items
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                total, number = piece_of.total(walk.total(extent)), i32(cuda.blockIdx.x)
                while number < total:
                    task, column = walk.task(piece_of.walk(number), work), piece_of.column(number)
                    while task.m0 < task.Sq:
                        put(slots.numbers, ticket.place(piece), task, column)
                        ticket.hand(slots, piece)
                        b = i32(0) if variant.varlen else task.b
                        stage = q_pipe.acquire(q_bars, piece)
                        queries.load(smem, stage, maps.q, task, b, q_bars.full)
                        tile, end = visits.last(task, options), u32(i + task.count)
                        while i != end:
                            token = i32(task.k_first + tile.n0)
                            stage = k_pipe.acquire(k_bars, i)
                            k_tile.load(smem, stage, maps.k, Corner(token, 0, (task.h_kv, b)), k_bars.full)
                            bias.bring(smem, bias_maps, bias_bars, options, task, tile.n0, i)
                            stage = v_pipe.acquire(v_bars, i)
                            v_tile.load(smem, stage, maps.v, Corner(column, token, (task.h_kv, b)), v_bars.full)
                            i = k_pipe.next(i)
                            tile = visits.before(tile, task, options)
                        piece = u32(piece + 1)
                        task = following(task, options)
                    number = ticket.draw(counter, number)
                put_end(slots.numbers, ticket.place(piece))
                ticket.hand(slots, piece)
        else:
            role.consume()
            factors, seed = probability.factors(options, scale), score.seed(options)
            scores, acc, probs, words = qk.fragment(), pv.fragment(), pv.left(), words_of_options()
            q_words = qk.words()
            base = base_of(smem)
            row_max, row_sum, rescale, new_max = rows.pair(), rows.pair(), rows.pair(), rows.pair()
            statistics = RowStatistics(row_max, row_sum, rescale, new_max)
            turn.begin(warpgroup)
            task, column = get(slots.numbers, ticket.take(slots, piece), extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                b, h, row = task.b, task.h, i32(ROWS * warpgroup)
                m = i32(task.m0 + row)
                sink = num.minus_inf
                rows.start(row_max, row_sum)
                q_at, sums = queries.at(q_pipe.wait(q_bars, piece)), pv.sums(acc)
                if task.count != u32(0):
                    tile = visits.last(task, options)
                    # not `where_of`: with a bias from memory, registers would spill
                    where = Where(b, h, m, tile.n0, task.Sq, task.Sk, task.offset)
                    picks = visits.picks(options, where, tile)
                    asked = score.ask(options, where)
                    if FETCHES:
                        score.fetch(words, options, where)
                    qk.take(q_words, smem, q_at, warpgroup)
                    stage = k_pipe.wait(k_bars, i)
                    qk.start(scores, q_words, base, q_at, k_tile.at(stage), warpgroup)
                    here, seen = where, score.sees(asked)
                    qk.wait(scores)
                    if Q_FREE_EARLY:
                        q_pipe.release(q_bars, piece)
                    k_pipe.release(k_bars, i)
                    tile = visits.before(tile, task, options)
                    held = bias.wait(smem, bias_bars, words, i, warpgroup)
                    visits.finish(scores, held, options, scale, where, picks, seen)
                    bias.release(bias_bars, i, warpgroup)
                    asked = score.ask(options, where_of_next(where, tile))
                    if FETCHES:  # for the next tile; after the last, for this one again
                        n0 = tile.n0 if task.count != u32(1) else where.n0
                        where = Where(b, h, m, n0, task.Sq, task.Sk, task.offset)
                        score.fetch(words, options, where)
                    probability.exponentials(scores, statistics, factors, options, where)
                    rows.pack(probs, scores)
                    score.drop(probs, options, here, seed)
                    adds, end = i32(0), u32(i + task.count)
                    i = k_pipe.next(i)
                    while i != end:
                        if not FETCHES:
                            where = Where(b, h, m, tile.n0, task.Sq, task.Sk, task.offset)
                        picks = visits.picks(options, where, tile)
                        stage = k_pipe.wait(k_bars, i)
                        turn.take(warpgroup)
                        qk.start(scores, q_words, base, q_at, k_tile.at(stage), warpgroup)  # scores = Q @ K.T
                        stage = v_pipe.wait(v_bars, i - 1)
                        pv.add(sums, probs, base, v_tile.at(stage), adds)  # acc [64, Dv] += P @ V, of the previous tile
                        turn.give(warpgroup)
                        adds = i32(1)
                        here, seen = where, score.sees(asked)
                        qk.wait_but_one(scores)
                        k_pipe.release(k_bars, i)
                        tile = visits.before(tile, task, options)
                        held = bias.wait(smem, bias_bars, words, i, warpgroup)
                        visits.finish(scores, held, options, scale, where, picks, seen)
                        bias.release(bias_bars, i, warpgroup)
                        asked = score.ask(options, where_of_next(where, tile))
                        if FETCHES:
                            n0 = tile.n0 if k_pipe.next(i) != end else where.n0
                            where = Where(b, h, m, n0, task.Sq, task.Sk, task.offset)
                            score.fetch(words, options, where)
                        probability.exponentials(scores, statistics, factors, options, where)
                        settle(row_sum[0] + row_sum[1])
                        pv.wait(sums)
                        v_pipe.release(v_bars, i - 1)
                        pv.collect(acc, sums)
                        scale_acc(acc, rescale)
                        rows.pack(probs, scores)
                        score.drop(probs, options, here, seed)
                        i = k_pipe.next(i)
                    if not O_OVER_Q and not Q_FREE_EARLY:
                        q_pipe.release(q_bars, piece)
                    stage = v_pipe.wait(v_bars, i - 1)
                    pv.add(sums, probs, base, v_tile.at(stage), adds)
                    if has_sinks:
                        sink = chain.sink(options, i64(h))
                    pv.wait(sums)
                    v_pipe.release(v_bars, i - 1)
                    pv.collect(acc, sums)
                else:
                    if not O_OVER_Q:
                        q_pipe.skip(q_bars, piece)
                    if has_sinks:  # a row with only a sink still has a sum
                        sink = chain.sink(options, i64(h))
                        for n in range(pv.size):
                            acc[n] = num.zero
                rows.total(row_sum)
                rows.close(row_max, row_sum, rescale, sink, factors[0])  # row_max becomes lse
                if has_sinks:
                    rows.scale_changed(acc, rescale)
                rows.divide(acc, row_sum, score.growth(options))
                upper, lower, rests = row_max[0], row_max[1], (rescale[0], rescale[1])
                if stores_lse and column == 0:
                    output.store_lse(to.lse, task, i32(row + my_row()), upper, rests[0])
                    output.store_lse(to.lse, task, i32(row + my_row() + 8), lower, rests[1])
                hidden.repair(acc, (upper, lower), x, task, row, column, work)
                if config.serial:
                    serial.add(to, acc, SplitLse((upper, lower), rests), task, row, column, options)
                else:
                    output.store(smem, to.o_map, to.o, acc, task, row, column)
                if O_OVER_Q:
                    output.free()
                piece = u32(piece + 1)
                task, column = get(slots.numbers, ticket.take(slots, piece), extent)
                if O_OVER_Q:
                    q_pipe.release(q_bars, piece - 1)  # `take` synchronizes: no lane reads o any more
            if not O_OVER_Q:
                output.finish()

    return flash_attention_sm90
