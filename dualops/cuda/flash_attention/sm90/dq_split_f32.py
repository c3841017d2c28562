"""dq of float32's wide heads on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, a walk like forward's.

Each number is three of bfloat16, each product six (`tile.split_bf16x3`): of 64 queries Q and dO are 96 KiB, so that a
block has no more. Of these one warpgroup makes P and hands it over, the other one dP, dS and dq:

    producer, one thread          warpgroup 0                          warpgroup 1
    for each piece of work        for each piece of work:              for each piece of work:
    that it draws:                3  lse of two rows a thread; wait    3  delta of them; wait for Q and dO
    1  load Q and dO                 for Q and dO                      for each tile:
    2  for each tile of           for each tile:                       4  dP [64, BLOCK_KV] = dO @ V.T
       BLOCK_KV keys that some    4  scores [64, BLOCK_KV] = Q @ K.T   5  it gets P * slope; dS = P * slope *
       of the queries see, the    5  scores through the options;          (weight * dP - delta)
       last first: load K and V      -inf where a mask is;             6  sums = dS @ K
                                     P = exp2(scores - lse)            7  acc [64, D] += sums
                                  6  P * slope is handed over          8  dq = acc * scale goes to memory

Of three products a tile warpgroup 1 has two: while its threads do arithmetic, the scores of a tile behind are made.
What products bring is added up by threads, as tensor cores round toward zero.

A tile that no query sees is not loaded, and masks are looked at in tiles alone that they cut (`kv_tiles`). What a mask
hides has P = 0, and 0 times a NaN in K, or in V, is a NaN: a row that is not finite is made anew (`nan_repair`). A row
that has seen nothing has lse = -inf, and gets zeros.

Shared memory: `DqThirdsConfig.tiles`, 6 * (64 * (D + Dv) + BLOCK_KV * (stages * D + v_stages * Dv)) + 256 * BLOCK_KV
bytes. Registers of warpgroup 1: BLOCK_KV / 2 of dP, BLOCK_KV * 3 / 4 of dS in thirds, D of acc and sums, and about 40.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer, u8, u32
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..gradient_of_queries import d_scores_apart, gradient_of_queries
from ..nan_repair import nan_repair
from ..options import chain_of
from ..tile_scheduler import ROWS_OF_A_HEAD, walk_by_queries
from ..tiles import Where
from ..work_queue import work_queue
from .arguments import MAPS_TYPE, queries_to_type, tiled_work_type
from .config import factors, padded
from .dq_config import DqThirdsConfig
from .kv_tiles import kv_tiles_of
from .output import rows_from_registers
from .tile_scheduler import SIZE, get_of, put, put_end

CONSUMERS, WARPS = 2, 4


@builds
def build_dq_split_f32(config: DqThirdsConfig, variant: Variant) -> Kernel:
    """flash_attention_dq_split_f32_sm90(maps, counter, to, x, work), with the arguments of `build_dq`."""
    D, Dv, BLOCK_KV = padded(variant.D), padded(variant.Dv), config.block_kv
    chain, role = chain_of(variant.having, variant.dtype, gradient=True), roles(CONSUMERS)
    tiles, dtype, ticket = config.tiles(D, Dv), factors(variant.dtype), work_queue(2, SIZE)
    q_tile, do_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.do, tiles.do_at, 2)
    k_tile, v_tile = box_tile(tiles.k, tiles.k_at, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_pipe = pipeline(1, tiles.q.nbytes + tiles.do.nbytes, CONSUMERS * WARPS)
    k_pipe = pipeline(config.stages, tiles.k.nbytes, CONSUMERS * WARPS)
    v_pipe = pipeline(config.v_stages, tiles.v.nbytes, WARPS)
    qk = warpgroup_mma(dtype, tiles.q, tiles.k, True, from_base=True)
    dov = warpgroup_mma(dtype, tiles.do, tiles.v, True, from_base=True)
    dsk = register_mma(dtype, tiles.k_right, True, from_base=True)
    box = warpgroup_exchange(tiles.p_at, qk.size, 1, exact=True)
    rows = softmax_rows(variant.dtype, qk.size, dsk.size)
    score = fragment_scores(chain, ROWS, BLOCK_KV, bent=chain.scores, others=variant.varlen)
    gradient = gradient_of_queries(chain, score, rows, qk.size, dsk.size)
    d_scores = d_scores_apart(score, box, dov.size)
    visits = kv_tiles_of(config.block_q, BLOCK_KV, variant, score)
    walk, get = walk_by_queries(config.block_q, visits.between, variant.varlen, chain), get_of()
    hidden = nan_repair(chain, variant, ROWS_OF_A_HEAD, visits.keys, dsk.size, passes=variant.varlen, gradient=True)
    to_type = queries_to_type(variant, "")
    output, ZERO = rows_from_registers(variant.D, D), i32(0)

    @kernel(
        MAPS_TYPE, pointer(i64), to_type, gradient_inputs_type(variant), tiled_work_type(variant), threads=role.threads
    )
    def flash_attention_dq_split_f32_sm90(maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_bars, p_bars = q_pipe.barriers(), k_pipe.barriers(), v_pipe.barriers(), box.barriers()
        slots = ticket.slots()
        extent, scale, lengths, options = work
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_pipe.init(k_bars)
            v_pipe.init(v_bars)
            box.init(p_bars)
            ticket.init(slots)
        prefetch_maps(maps, 1)
        q_pipe.start()
        i, piece = u32(0), u32(0)  # fillings of K's and V's stages, and of Q's
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                total, number = walk.total(extent), i32(cuda.blockIdx.x)
                while number < total:
                    task = walk.task(number, extent, lengths, options)
                    if task.m0 < task.Sq:
                        put(slots.numbers, ticket.place(piece), task, i32(0))
                        ticket.hand(slots, piece)
                        b = i32(0) if variant.varlen else task.b
                        stage, token = q_pipe.acquire(q_bars, piece), i32(task.q_first + task.m0)
                        q_tile.load(smem, stage, maps.q, Corner(token, 0, (task.h, b)), q_bars.full)
                        do_tile.load(smem, stage, maps.do, Corner(token, 0, (task.h, b)), q_bars.full)
                        tile, end = visits.last(task, options), u32(i + task.count)
                        while i != end:
                            corner = Corner(i32(task.k_first + tile.n0), 0, (task.h_kv, b))
                            k_tile.load(smem, k_pipe.acquire(k_bars, i), maps.k, corner, k_bars.full)
                            v_tile.load(smem, v_pipe.acquire(v_bars, i), maps.v, corner, v_bars.full)
                            i = k_pipe.next(i)
                            tile = visits.before(tile, task, options)
                        piece = u32(piece + 1)
                    number = ticket.draw(counter, number)
                put_end(slots.numbers, ticket.place(piece))
                ticket.hand(slots, piece)
        elif warpgroup == 0:
            role.consume()
            scores, held, base = qk.fragment(), cuda.local.array(1, u32), base_of(smem)
            row_lse, row_base = gradient.pair(), gradient.pair()
            task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                gradient.read(row_lse, x.lse, task, ZERO)
                gradient.bases(row_base, row_lse)
                q_at = q_tile.at(q_pipe.wait(q_bars, piece))
                tile, end = visits.last(task, options), u32(i + task.count)
                while i != end:
                    qk.start(scores, base, q_at, k_tile.at(k_pipe.wait(k_bars, i)), ZERO)  # scores = Q @ K.T
                    where = Where(task.b, task.h, task.m0, tile.n0, task.Sq, task.Sk, task.offset)
                    picks = visits.picks(options, where, tile)
                    seen = score.sees(score.ask(options, where))
                    tile = visits.before(tile, task, options)
                    qk.wait(scores)
                    k_pipe.release(k_bars, i)
                    visits.finish(scores, held, options, scale, where, picks, seen)
                    gradient.probs(scores, held, options, scale, where, row_base)
                    box.put(smem, box.claim(p_bars, i), scores)
                    box.hand(p_bars, i)
                    i = k_pipe.next(i)
                q_pipe.skip(q_bars, piece)
                piece = u32(piece + 1)
                task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
        else:
            role.consume()
            d_probs, acc, packed, base = dov.fragment(), dsk.fragment(), dsk.left(), base_of(smem)
            row_lse, row_delta = gradient.pair(), gradient.pair()
            task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                gradient.read(row_delta, x.delta, task, ZERO)
                do_at, sums = do_tile.at(q_pipe.wait(q_bars, piece)), dsk.sums(acc)
                tile, end = visits.last(task, options), u32(i + task.count)
                while i != end:
                    dov.start(d_probs, base, do_at, v_tile.at(v_pipe.wait(v_bars, i)), ZERO)  # dP = dO @ V.T
                    where = Where(task.b, task.h, task.m0, tile.n0, task.Sq, task.Sk, task.offset)
                    tile = visits.before(tile, task, options)
                    dov.wait(d_probs)
                    v_pipe.release(v_bars, i)
                    d_scores(d_probs, smem, box.take(p_bars, i), options, where, row_delta)
                    box.leave(p_bars, i)
                    rows.pack(packed, d_probs)
                    dsk.add(sums, packed, base, k_tile.at(k_pipe.stage(i)), ZERO)  # there, as P was made of it
                    dsk.finish(acc, sums)  # acc [64, D] += dS @ K
                    k_pipe.release(k_bars, i)
                    i = k_pipe.next(i)
                task, _ = get(slots.numbers, ticket.place(piece), extent)  # again: it held registers
                q_pipe.release(q_bars, piece)
                gradient.read(row_lse, x.lse, task, ZERO)
                lse_pair = (row_lse[0], row_lse[1])
                hidden.repair(acc, lse_pair, (x.q, x.k, x.v, x.do, x.delta), task, ZERO, ZERO, scale, options)
                gradient.scale(acc, scale, row_lse)
                output.store(smem, to.dq_map, to.dq, acc, task, ZERO, ZERO)
                piece = u32(piece + 1)
                task, _ = get(slots.numbers, ticket.take(slots, piece), extent)

    return flash_attention_dq_split_f32_sm90
