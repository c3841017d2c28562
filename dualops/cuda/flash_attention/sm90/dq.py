"""dq of attention on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, a walk like forward's.

A block takes BLOCK_Q queries of one head, 64 for each warpgroup that multiplies, and when they are done the next ones;
one thread of another warpgroup loads.

    producer, one thread                       consumers
    for each piece of work that it draws:      for each piece of work:
    1  load Q and dO                           3  lse and delta of two rows a thread; wait for Q and dO
    2  for each tile of BLOCK_KV keys that     for each tile:
       some of the queries see, the last       4  acc [64, D] += dS @ K of the tile before
       first: load V and K, and the bias's     5  scores [64, BLOCK_KV] = Q @ K.T, beside 4
       where it comes as boxes
                                               6  when 4 is over: dP [64, BLOCK_KV] = dO @ V.T, beside 5
                                               7  when 5 is over, beside 6: scores through the options; -inf where a
                                                  mask is; P = exp2(scores - lse) * slope
                                               8  when 6 is over: dS = P * (weight * dP - delta)
                                               9  dq = acc * scale, which is copied out of shared memory while the
                                                  next piece begins

At 4, dS is the left factor as it lies in registers, and they are free when dP needs them. At 7 a warpgroup has the
product of 6 under way, and those of the other warpgroups, which may take turns to start theirs. K of a tile is read
twice: by its rows for the scores, by its columns for dq. A bias that comes as boxes (`bias_tiles`) is read by each
thread as 7 needs it, and its tile is free when 7 is over; another one is read from memory, score by score.

A tile that no query sees is not loaded, and masks are looked at in tiles alone that they cut (`kv_tiles`). What a mask
hides has P = 0, and 0 times a NaN in K, or in V, is a NaN: a row that is not finite is made anew (`nan_repair`). A row
that has seen nothing has lse = -inf, and gets zeros.

Shared memory: `DqConfig.tiles`, 2 * (BLOCK_Q * (q_stages * (D + Dv) + D) + stages * BLOCK_KV * (D + Dv)) bytes, where
dq is over Q BLOCK_Q * D less, and for the bias 2 * bias_stages * BLOCK_Q * BLOCK_KV more. Registers: BLOCK_KV / 2
scores and as many of dP, D / 2 of acc, and about 40. float32 is three parts of bfloat16, as in forward: tiles are three
times as wide, dS is three times as many words, and D / 2 registers more have what is added to acc.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, u8, u32
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ..arguments import Variant, gradient_inputs_type
from ..bias_registers import in_words
from ..fragment_scores import fragment_scores
from ..gradient_of_queries import gradient_of_queries
from ..nan_repair import nan_repair
from ..options import chain_of
from ..pingpong import turns
from ..tile_scheduler import ROWS_OF_A_HEAD, walk_by_queries
from ..tiles import Where
from ..work_queue import work_queue
from .arguments import MAPS_TYPE, queries_to_type, tiled_work_type
from .bias_fwd import bias_stages
from .config import factors, padded
from .dq_config import DqConfig
from .kv_tiles import kv_tiles_of
from .output import rows_from_registers, rows_output
from .tile_scheduler import SIZE, get_of, put, put_end


@builds
def build_dq(config: DqConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work). These are `Maps`, one map of the bias where it
    comes as boxes, a counter that is 0, `QueriesTo`, `GradientInputs` and `TiledWork`.

    stored: how dq gets to memory (`output`).
    """
    D, Dv, BLOCK_KV, DQ_OVER_Q = padded(variant.D), padded(variant.Dv), config.block_kv, config.dq_over_q
    num, role, ZEROED = numbers(f32), roles(config.consumers, most=True), int(config.zeroed)
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    in_boxes = in_words(variant.having) if config.bias_stages else variant.having
    tile_chain = chain_of(in_boxes, variant.dtype, gradient=True)
    warps, tiles = 4 * config.consumers, config.tiles(D, Dv)
    ticket = work_queue(config.q_stages + 1, SIZE)
    q_tile, do_tile = box_tile(tiles.q, 0, 2), box_tile(tiles.do, tiles.do_at, 2)
    k_tile, v_tile = box_tile(tiles.k, tiles.k_at, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_pipe = pipeline(config.q_stages, tiles.q.nbytes + tiles.do.nbytes, warps)
    k_pipe, v_pipe = pipeline(config.stages, tiles.k.nbytes, warps), pipeline(config.stages, tiles.v.nbytes, warps)
    dtype, thirds = factors(variant.dtype), config.thirds
    qk, dov = warpgroup_mma(dtype, tiles.q, tiles.k, thirds), warpgroup_mma(dtype, tiles.do, tiles.v, thirds)
    dsk = register_mma(dtype, tiles.k_right, thirds)
    rows = softmax_rows(variant.dtype, qk.size, dsk.size)
    bias = bias_stages(variant, tiles.bias, tiles.bias_at, config.bias_stages, config.consumers)
    score = fragment_scores(tile_chain, ROWS, BLOCK_KV, bent=chain.scores, word=bias.word, others=variant.varlen)
    gradient = gradient_of_queries(tile_chain, score, rows, qk.size, dsk.size)
    turn = turns(config.consumers if config.turns else 1)
    visits = kv_tiles_of(config.block_q, BLOCK_KV, variant, score)
    walk, get = walk_by_queries(config.block_q, visits.between, variant.varlen, chain), get_of()
    hidden = nan_repair(chain, variant, ROWS_OF_A_HEAD, visits.keys, dsk.size, passes=variant.varlen, gradient=True)
    beside = config.consumers if DQ_OVER_Q else 0
    to_type, x_type = queries_to_type(variant, stored), gradient_inputs_type(variant)
    if thirds:
        output = rows_from_registers(variant.D, D)
    else:
        output = rows_output(stored, variant.dtype, variant.D, D, tiles.dq_at, beside)

    @kernel(MAPS_TYPE, bias.maps_type, pointer(i64), to_type, x_type, tiled_work_type(variant), threads=role.threads)
    def flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        q_bars, k_bars, v_bars, slots = q_pipe.barriers(), k_pipe.barriers(), v_pipe.barriers(), ticket.slots()
        bias_bars = bias.barriers()
        extent, scale, lengths, options = work
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
        i, piece = u32(0), u32(0)  # fillings of K's and V's stages, and of Q's
        if warpgroup == config.consumers:
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
                            token = i32(task.k_first + tile.n0)
                            stage = v_pipe.acquire(v_bars, i)
                            v_tile.load(smem, stage, maps.v, Corner(token, 0, (task.h_kv, b)), v_bars.full)
                            stage = k_pipe.acquire(k_bars, i)
                            k_tile.load(smem, stage, maps.k, Corner(token, 0, (task.h_kv, b)), k_bars.full)
                            bias.bring(smem, bias_maps, bias_bars, options, task, tile.n0, i)
                            i = k_pipe.next(i)
                            tile = visits.before(tile, task, options)
                        piece = u32(piece + 1)
                    number = ticket.draw(counter, number)
                put_end(slots.numbers, ticket.place(piece))
                ticket.hand(slots, piece)
        else:
            role.consume()
            scores, d_probs, acc, d_scores = qk.fragment(), dov.fragment(), dsk.fragment(), dsk.left()
            words = bias.words()
            row_lse, row_base, row_delta = gradient.pair(), gradient.pair(), gradient.pair()
            turn.begin(warpgroup)
            task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
            while task.m0 >= 0:
                i = u32(shfl_idx_i32(i32(i), 0, FULL_WARP))
                row = i32(ROWS * warpgroup)
                m = i32(task.m0 + row)
                gradient.read(row_lse, x.lse, task, row)
                gradient.read(row_delta, x.delta, task, row)
                gradient.bases(row_base, row_lse)
                stage = q_pipe.wait(q_bars, piece)
                q_at, do_at, sums = q_tile.at(stage), do_tile.at(stage), dsk.sums(acc)
                if ZEROED:
                    for n in range(dsk.size):
                        acc[n] = num.zero
                if task.count != u32(0):
                    tile = visits.last(task, options)
                    where = Where(task.b, task.h, m, tile.n0, task.Sq, task.Sk, task.offset)
                    picks = visits.picks(options, where, tile)
                    stage = k_pipe.wait(k_bars, i)
                    qk.start(scores, smem, q_at, k_tile.at(stage), warpgroup)
                    stage = v_pipe.wait(v_bars, i)
                    dov.start(d_probs, smem, do_at, v_tile.at(stage), warpgroup)
                    seen = score.sees(score.ask(options, where))
                    qk.wait_but_one(scores)
                    tile = visits.before(tile, task, options)
                    held = bias.wait(smem, bias_bars, words, i, warpgroup)
                    visits.finish(scores, held, options, scale, where, picks, seen)
                    gradient.probs(scores, held, options, scale, where, row_base)
                    bias.release(bias_bars, i, warpgroup)
                    dov.wait(d_probs)
                    v_pipe.release(v_bars, i)
                    gradient.d_scores(scores, d_probs, options, where, row_delta)
                    rows.pack(d_scores, scores)
                    adds, end = i32(ZEROED), u32(i + task.count)
                    i = k_pipe.next(i)
                    while i != end:
                        where = Where(task.b, task.h, m, tile.n0, task.Sq, task.Sk, task.offset)
                        picks = visits.picks(options, where, tile)
                        stage, before = k_pipe.wait(k_bars, i), k_pipe.stage(i - 1)
                        turn.take(warpgroup)
                        dsk.add(sums, d_scores, smem, k_tile.at(before), adds)  # acc [64, D] += dS @ K, the tile before
                        qk.start(scores, smem, q_at, k_tile.at(stage), warpgroup)  # scores = Q @ K.T
                        stage = v_pipe.wait(v_bars, i)
                        dsk.wait_but_one(sums)
                        k_pipe.release(k_bars, i - 1)
                        dsk.collect(acc, sums)
                        dov.start(d_probs, smem, do_at, v_tile.at(stage), warpgroup)  # dP = dO @ V.T
                        turn.give(warpgroup)
                        adds = i32(1)
                        seen = score.sees(score.ask(options, where))
                        qk.wait_but_one(scores)
                        tile = visits.before(tile, task, options)
                        held = bias.wait(smem, bias_bars, words, i, warpgroup)
                        visits.finish(scores, held, options, scale, where, picks, seen)
                        gradient.probs(scores, held, options, scale, where, row_base)
                        bias.release(bias_bars, i, warpgroup)
                        dov.wait(d_probs)
                        v_pipe.release(v_bars, i)
                        gradient.d_scores(scores, d_probs, options, where, row_delta)
                        rows.pack(d_scores, scores)
                        i = k_pipe.next(i)
                    task, _ = get(slots.numbers, ticket.place(piece), extent)  # again: it held registers
                    if not DQ_OVER_Q:
                        q_pipe.release(q_bars, piece)
                    dsk.add(sums, d_scores, smem, k_tile.at(k_pipe.stage(i - 1)), adds)
                    dsk.wait(sums)
                    k_pipe.release(k_bars, i - 1)
                    dsk.collect(acc, sums)
                else:
                    if not DQ_OVER_Q:
                        q_pipe.skip(q_bars, piece)
                    if not ZEROED:
                        for n in range(dsk.size):
                            acc[n] = num.zero
                gradient.read(row_lse, x.lse, task, row)
                lse_pair = (row_lse[0], row_lse[1])
                hidden.repair(acc, lse_pair, (x.q, x.k, x.v, x.do, x.delta), task, row, i32(0), scale, options)
                gradient.scale(acc, scale, row_lse)
                output.store(smem, to.dq_map, to.dq, acc, task, row, i32(0))
                if DQ_OVER_Q:
                    output.free()
                piece = u32(piece + 1)
                task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
                if DQ_OVER_Q:
                    q_pipe.release(q_bars, piece - 1)  # lanes have met: none reads dq any more
            if not DQ_OVER_Q:
                output.finish()

    return flash_attention_dq_sm90
