"""dbias of attention on Hopper's tensor cores: dS, summed over the axes that the bias is broadcast on.

A block takes a tile of the bias, 64 rows for each warpgroup that multiplies by BLOCK_KV columns, and makes dS of every
tile of scores that it was added to, one after another (`bias_tile_scheduler`), so that every sum has one owner and one
order; then the next tile of the bias.

    producer, two threads                      consumers
    for each tile of the bias, for each tile   for each tile of the bias:
    of scores that it was added to:            3  its words, each thread its own; totals [64, BLOCK_KV] = 0
    1  one loads Q, then dO, where they are    for each tile of scores:
       not those of the tile before            4  scores [64, BLOCK_KV] = Q @ K.T
    2  one loads K, then V, likewise           5  dP [64, BLOCK_KV] = dO @ V.T, beside 6
                                               6  scores through the options, the bias among them;
                                                  P = exp2(scores - lse)
                                               7  totals += P * (weight * dP - delta), but where a mask is
                                               8  dbias = totals, summed over rows or columns that the bias has one of

A tile of scores is two products of all that is loaded for it, and as many exponentials as scores: what threads do is
what it waits for. So warpgroups take turns to start 4 and 5, and each has the other one's products beside 6 and 7;
where options take the registers that dP would have meanwhile (`DbiasConfig.overlap`), 5 comes after 6, without turns.
lse and delta of the next tile's two rows a thread are read beside the products. Where all scores of a warp count, which
it finds by their products two by two, nothing asks for each of them whether a mask is there.

totals are plain sums of float32. Of n terms they are off by at most n * 2**-24 of the terms' sum, and by its root where
roundings go either way: of 16 bits, to which dbias is rounded, they reach 2**-12, half a last place, where that many
terms all lean to one side. What is left to add is compensated (`dbias_sums`): pieces, where tiles of the bias are few.

What a mask hides has no part in a sum, whatever V, K and dO hold there; nor have queries beyond the last.

Shared memory: `DbiasConfig.tiles`, 2 * stages * (BLOCK_Q + BLOCK_KV) * max(D, Dv) bytes, and the bias's tile.
Registers: BLOCK_KV / 2 scores, as many of dP and totals, and about 40.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, i32, kernel, types, u8, u32
from ...launch.views import strided
from ...tile.boxes import box_tile, prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma
from ..arguments import Variant, size_types, statistic_type
from ..bias_registers import bias_registers, in_words
from ..fragment_scores import fragment_scores
from ..gradient_of_bias import gradient_of_bias
from ..gradient_of_queries import rows_of_queries
from ..options import chain_of
from ..pingpong import turns
from ..tiles import Where
from .arguments import MAPS_TYPE
from .bias_tile_scheduler import BiasExtent, Broadcast, bias_walk
from .config import padded
from .dbias_config import DbiasConfig
from .dbias_loads import Lines, ring_of_lines
from .dbias_sums import PLACES, bias_sums


@builds
def build_dbias(config: DbiasConfig, variant: Variant, one: Broadcast, to_dtype: str, vectors: bool) -> Kernel:
    """flash_attention_dbias_sm90(maps, to, lse, delta, extent, scale, options). maps: `Maps`. extent: `BiasExtent`.

    to: dbias, or its parts, of this dtype. vectors: whether eight neighbours of a row may be stored at once.
    """
    D, Dv, BLOCK_KV = padded(variant.D), padded(variant.Dv), config.block_kv
    chain, role = chain_of(in_words(variant.having), variant.dtype), roles(config.consumers)
    warps, tiles = 4 * config.consumers, config.tiles(D, Dv)
    ranged = any(option.name == "band" for option, _ in variant.having.variants)
    walk = bias_walk(config.block_q, BLOCK_KV, one, chain, ranged=ranged)
    turn, OVERLAP, ONE_COLUMN = turns(config.consumers if config.overlap else 1), config.overlap, one.column
    q_tile, do_tile = (box_tile(tile, 0, 2, room=tiles.query_bytes) for tile in (tiles.q, tiles.do))
    k_tile, v_tile = (box_tile(tile, tiles.keys_at, 2, room=tiles.key_bytes) for tile in (tiles.k, tiles.v))
    q_pipe, do_pipe = (pipeline(config.stages, tile.nbytes, warps) for tile in (tiles.q, tiles.do))
    k_pipe, v_pipe = (pipeline(config.stages, tile.nbytes, warps) for tile in (tiles.k, tiles.v))
    queries = ring_of_lines(Lines(q_tile, do_tile, q_pipe, do_pipe), walk, of_keys=False, stays=one.column)
    keys = ring_of_lines(Lines(k_tile, v_tile, k_pipe, v_pipe), walk, of_keys=True, stays=not one.column)
    qk, dov = warpgroup_mma(variant.dtype, tiles.q, tiles.k), warpgroup_mma(variant.dtype, tiles.do, tiles.v)
    own = bias_registers(variant, BLOCK_KV, 128 * config.consumers)
    score = fragment_scores(chain, ROWS, BLOCK_KV, marks=True, word=own.word)
    gradient, statistics = gradient_of_bias(qk.size), rows_of_queries(qk.size)
    sums = bias_sums(to_dtype, qk.size, config.consumers, one, vectors=vectors)

    to_type, statistic_types = strided(to_dtype, PLACES), [statistic_type(variant)] * 2
    extent_type = types.NamedUniTuple(i32, len(BiasExtent._fields), BiasExtent)
    *_, scale_type, _, options_type = size_types(variant)

    @kernel(MAPS_TYPE, to_type, *statistic_types, extent_type, scale_type, options_type, threads=role.threads)
    def flash_attention_dbias_sm90(maps, to, lse, delta, extent, scale, options):
        smem = cuda.shared.array(0, u8, alignment=1024)
        query_bars, key_bars, words = queries.barriers(), keys.barriers(), own.words()
        Sq, Sk = extent.Sq, extent.Sk
        offset, warpgroup = i32(extent.aligned * (Sk - Sq)), my_warpgroup()
        if cuda.threadIdx.x == 0:
            queries.init(query_bars)
            keys.init(key_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                queries.bring(smem, (maps.q, maps.do), query_bars, extent, offset, options)
            elif cuda.threadIdx.x % 128 == 32:
                keys.bring(smem, (maps.k, maps.v), key_bars, extent, offset, options)
        else:
            role.consume()
            scores, d_probs, totals = qk.fragment(), dov.fragment(), qk.fragment()
            row_base, row_delta = statistics.pair(), statistics.pair()
            next_lse, next_delta = statistics.pair(), statistics.pair()
            i, kept, row = u32(0), u32(0), i32(ROWS * warpgroup)  # fillings of what passes, and of what stays
            number, numbers = walk.first_number(), walk.numbers(extent)
            turn.begin(warpgroup)
            while number < numbers:
                part = walk.part(number, extent)
                i, kept = u32(shfl_idx_i32(i32(i), 0, FULL_WARP)), u32(shfl_idx_i32(i32(kept), 0, FULL_WARP))
                gradient.clear(totals)
                visit = walk.first(part, extent, offset, options)
                if visit.v < part.end:
                    statistics.read(next_lse, lse, visit, row)
                    statistics.read(next_delta, delta, visit, row)
                    own.fill(words, options, part.b, part.h, part.m0, part.n0, extent.Sq_bias, extent.Sk_bias)
                while visit.v < part.end:
                    of_queries, of_keys = (kept, i) if ONE_COLUMN else (i, kept)
                    where = Where(visit.b, visit.h, i32(visit.m0 + row), visit.n0, Sq, Sk, offset)
                    gradient.bases(row_base, next_lse)
                    row_delta[0], row_delta[1] = next_delta[0], next_delta[1]
                    q_at, k_at = queries.first(query_bars, of_queries), keys.first(key_bars, of_keys)
                    turn.take(warpgroup)
                    qk.start(scores, smem, q_at, k_at, warpgroup)  # scores = Q @ K.T
                    if OVERLAP:
                        do_at, v_at = queries.second(query_bars, of_queries), keys.second(key_bars, of_keys)
                        dov.start(d_probs, smem, do_at, v_at, warpgroup)  # dP = dO @ V.T
                    turn.give(warpgroup)
                    following = walk.after(visit, part, extent, offset, options)
                    last = following.v == part.end or not walk.stays(visit, following)
                    if following.v < part.end:
                        statistics.read(next_lse, lse, following, row)
                        statistics.read(next_delta, delta, following, row)
                    if OVERLAP:
                        qk.wait_but_one(scores)
                    else:
                        qk.wait(scores)
                    queries.release_first(query_bars, of_queries, last)
                    keys.release_first(key_bars, of_keys, last)
                    score.finish_held(scores, words, options, scale, where, score.sees(score.ask(options, where)))
                    all_count = gradient.all_count(scores, where, row_base)
                    gradient.probabilities(scores, where, row_base, all_count)
                    if not OVERLAP:
                        do_at, v_at = queries.second(query_bars, of_queries), keys.second(key_bars, of_keys)
                        dov.start(d_probs, smem, do_at, v_at, warpgroup)  # dP = dO @ V.T
                    dov.wait(d_probs)
                    queries.release_second(query_bars, of_queries, last)
                    keys.release_second(key_bars, of_keys, last)
                    score.weigh(d_probs, options, where)
                    gradient.add(totals, scores, d_probs, row_delta, all_count)
                    i = q_pipe.next(i)
                    if last:
                        kept = q_pipe.next(kept)
                    visit = following
                sums.store(to, totals, part, extent)
                number = walk.next_number(number)

    return flash_attention_dbias_sm90
