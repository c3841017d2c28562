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

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, pointer, u8, u32
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..nan_repair import nan_repair
from ..options import chain_of
from ..score_gradients import d_scores_apart, gradient_of_queries
from ..tile_scheduler import ROWS_OF_A_HEAD, tiled_work_type, walk_by_queries
from ..tiles import where_of
from .arguments import MAPS_TYPE, queries_to_type
from .bias import bias_stages, in_words
from .config import DqConfig, DqThirdsConfig, factors, padded
from .output import rows_from_registers, rows_output
from .schedule import SIZE, get_of, put, put_end, turns, work_queue
from .visible_tiles import kv_tiles_of


@builds
def build_dq(config: DqConfig, variant: Variant, stored: str) -> Kernel:
    """flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work): `Maps`, one map of a bias as boxes or none, a
    counter of 0, `QueriesTo`, `GradientInputs`, `TiledWork`.

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
    bias = bias_stages(variant, config.bias, tiles.bias_at, config.bias_stages, config.consumers)
    score = fragment_scores(tile_chain, ROWS, BLOCK_KV, bent=chain.scores, word=bias.word, others=variant.varlen)
    gradient = gradient_of_queries(tile_chain, score, rows, qk.size, dsk.size)
    turn = turns(config.consumers if config.turns else 1)
    visits = kv_tiles_of(config.block_q, BLOCK_KV, variant, score)
    walk, get = walk_by_queries(config.block_q, visits.between, variant.varlen, chain), get_of()
    hidden = nan_repair(chain, variant, ROWS_OF_A_HEAD, visits.keys, dsk.size, passes=variant.varlen, gradient=True)
    over_q = config.consumers if DQ_OVER_Q else 0
    to_type, x_type = queries_to_type(variant, stored), gradient_inputs_type(variant)
    if thirds:
        output = rows_from_registers(variant.D, D)
    else:
        output = rows_output(stored, variant.dtype, variant.D, D, tiles.dq_at, over_q)

    @kernel(MAPS_TYPE, bias.maps_type, pointer(i64), to_type, x_type, tiled_work_type(variant), threads=role.threads)
    def flash_attention_dq_sm90(maps, bias_maps, counter, to, x, work):
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
                total, number = walk.total(extent), i32(cuda.blockIdx.x)
                while number < total:
                    task = walk.task(number, work)
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
                    where = where_of(task, task.h, m, tile.n0)
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
                        where = where_of(task, task.h, m, tile.n0)
                        picks = visits.picks(options, where, tile)
                        stage, before = k_pipe.wait(k_bars, i), k_pipe.stage(i - 1)
                        turn.take(warpgroup)
                        dsk.add(sums, d_scores, smem, k_tile.at(before), adds)  # acc [64, D] += dS @ K, previous tile
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
                    task, _ = get(slots.numbers, ticket.place(piece), extent)  # again: it would hold registers
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
                hidden.repair(acc, (row_lse[0], row_lse[1]), x, task, row, i32(0), work)
                gradient.scale(acc, scale, row_lse)
                output.store(smem, to.dq_map, to.dq, acc, task, row, i32(0))
                if DQ_OVER_Q:
                    output.free()
                piece = u32(piece + 1)
                task, _ = get(slots.numbers, ticket.take(slots, piece), extent)
                if DQ_OVER_Q:
                    q_pipe.release(q_bars, piece - 1)  # `take` synchronizes: no lane reads dq any more
            if not DQ_OVER_Q:
                output.finish()

    return flash_attention_dq_sm90


CONSUMERS, WARPS = 2, 4


@builds
def build_dq_split_f32(config: DqThirdsConfig, variant: Variant) -> Kernel:
    """flash_attention_dq_split_f32_sm90(maps, counter, to, x, work), with the records of `build_dq`."""
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
        extent, scale, options = work.extent, work.scale, work.options
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            q_pipe.init(q_bars)
            k_pipe.init(k_bars)
            v_pipe.init(v_bars)
            box.init(p_bars)
            ticket.init(slots)
        prefetch_maps(maps, 1)
        q_pipe.start()
        i, piece = u32(0), u32(0)  # numbers of K's and V's tiles, and of work items
        if warpgroup == CONSUMERS:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                total, number = walk.total(extent), i32(cuda.blockIdx.x)
                while number < total:
                    task = walk.task(number, work)
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
                    where = where_of(task, task.h, task.m0, tile.n0)
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
                    where = where_of(task, task.h, task.m0, tile.n0)
                    tile = visits.before(tile, task, options)
                    dov.wait(d_probs)
                    v_pipe.release(v_bars, i)
                    d_scores(d_probs, smem, box.take(p_bars, i), options, where, row_delta)
                    box.leave(p_bars, i)
                    rows.pack(packed, d_probs)
                    dsk.add(sums, packed, base, k_tile.at(k_pipe.stage(i)), ZERO)  # K has arrived, as P has
                    dsk.finish(acc, sums)  # acc [64, D] += dS @ K
                    k_pipe.release(k_bars, i)
                    i = k_pipe.next(i)
                task, _ = get(slots.numbers, ticket.place(piece), extent)  # again: it would hold registers
                q_pipe.release(q_bars, piece)
                gradient.read(row_lse, x.lse, task, ZERO)
                hidden.repair(acc, (row_lse[0], row_lse[1]), x, task, ZERO, ZERO, work)
                gradient.scale(acc, scale, row_lse)
                output.store(smem, to.dq_map, to.dq, acc, task, ZERO, ZERO)
                piece = u32(piece + 1)
                task, _ = get(slots.numbers, ticket.take(slots, piece), extent)

    return flash_attention_dq_split_f32_sm90
