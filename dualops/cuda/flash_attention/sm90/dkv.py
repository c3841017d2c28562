"""dk and dv of attention on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

A block has BLOCK_KV keys of one key head, 64 for each consumer warpgroup, and visits all queries that see them, one
tile of BLOCK_Q queries after another, so that every sum has one owner and one order. Rows are keys, columns queries.

    producer                                   consumers
    1  one thread loads K and V                3  wait for K and V
    2  for each query head of the group, for   for each tile:
       each tile of queries that see some of   4  S.T [64, BLOCK_Q] = K @ Q.T, dP.T [64, BLOCK_Q] = V @ dO.T
       the keys: it loads Q and dO, and a      5  S.T through the options; P.T = exp2(S.T - lse), 0 if masked
       warp loads lse and delta                6  dv [64, Dv] += (weight * P.T) @ dO
                                               7  dS.T = P.T * (weight * dP.T - delta) * slope
                                               8  dk [64, D] += dS.T @ Q
                                               9  dk *= scale; dk leaves through K's place, dv through V's

Products overlap other work: 5 overlaps dP.T, 7 overlaps 6 if there are registers for it (`DkvConfig.overlap`), 4
overlaps 8 of the previous tile, and all overlap the other warpgroup's. P.T and dS.T never leave registers:
accumulators, packed in pairs, are the left factors of 6 and 8, which read dO and Q along their other axis.

Tiles that no key is seen from are not loaded, and masks are evaluated only in tiles that they cut (`visible_tiles`). A
P.T of 0 times a NaN in Q or dO is NaN even if a mask hides it: rows that are not finite are recomputed (`nan_repair`).

Shared memory: `DkvConfig.tiles`, 2 * (D + Dv) * (BLOCK_KV + stages * BLOCK_Q) bytes, and 2 * stages * BLOCK_Q *
BLOCK_KV for a bias as boxes (`bias`). Registers: BLOCK_Q of S.T and dP.T, a quarter of that packed, twice with
`overlap`, D / 2 + Dv / 2 of dk and dv, and about 24. Options need few more: S.T becomes P.T * slope in place, and
dropout's mask is bits, computed while products run. float32 is three parts of bfloat16, as in forward: tiles are three
times as wide and packed registers three times as many. Threads add the sums of 6 and 8, which takes D / 2 registers
more, so they wait for 8 at once.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u8, u32
from ...tile.boxes import box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..lse_delta_smem import lse_delta_of
from ..nan_repair import nan_repair_keys
from ..options import chain_of
from ..score_gradients import gradient_of_keys
from ..score_mod import Given
from ..tile_scheduler import key_rows_of, tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, keys_to_type
from .bias import bias_dkv, in_words
from .config import factors, padded
from .dkv_config import DkvConfig
from .dkv_loads import LoadBarriers, LoadedTiles, LoadTo, load_once, loads_of
from .output import rows_from_registers, rows_output
from .visible_tiles import q_tiles_of


@builds
def build_dkv(config: DkvConfig, variant: Variant, dk_stored: str, dv_stored: str, packed: bool = False) -> Kernel:
    """flash_attention_dkv_sm90(maps, bias_maps, to, x, work): `Maps`, one map of a bias as boxes or none, `KeysTo`,
    `GradientInputs`, `TiledWork`.

    dk_stored, dv_stored: how dk and dv get to memory (`output`). packed: as in `walk_by_keys`.
    """
    D, Dv, BLOCK_Q, OVERLAP, num = padded(variant.D), padded(variant.Dv), config.block_q, config.overlap, numbers(f32)
    chain, role = chain_of(variant.having, variant.dtype, gradient=True), roles(config.consumers, most=True)
    in_boxes = in_words(variant.having) if config.bias_in_boxes else variant.having
    tile_chain = chain_of(in_boxes, variant.dtype, gradient=True)
    warps, tiles = 4 * config.consumers, config.tiles(D, Dv)
    k_tile, v_tile = box_tile(tiles.k, 0, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_tile, do_tile = box_tile(tiles.q, tiles.q_at, 2), box_tile(tiles.do, tiles.do_at, 2)
    kv_once, q_pipe = load_once(tiles.k.nbytes + tiles.v.nbytes), pipeline(config.stages, tiles.q.nbytes, warps)
    bias = bias_dkv(variant, config.bias, tiles.bias_at, warps)
    do_part = second_barrier(config.stages, tiles.do.nbytes + bias.nbytes, writers=1)  # with lse and delta
    dtype, thirds = factors(variant.dtype), config.thirds
    kq, vdo = warpgroup_mma(dtype, tiles.k, tiles.q, thirds), warpgroup_mma(dtype, tiles.v, tiles.do, thirds)
    pdo, dsq = register_mma(dtype, tiles.do_steps, thirds), register_mma(dtype, tiles.q_steps, thirds)
    score = fragment_scores(
        tile_chain, ROWS, BLOCK_Q, bent=chain.bends, transposed=True, word=bias.word, others=variant.varlen
    )
    columns = lse_delta_of(config.block_q, config.stages, chain)
    hidden = nan_repair_keys(chain, variant, dsq.size, pdo.size)
    gradient = gradient_of_keys(tile_chain, score, variant.dtype, BLOCK_Q)
    loaded = LoadedTiles(k_tile, v_tile, q_tile, do_tile)
    visits = q_tiles_of(BLOCK_Q, variant, score)
    load = loads_of(loaded, bias, kv_once, q_pipe, do_part, columns, visits, variant.varlen)
    task_of = walk_by_keys(config.block_kv, BLOCK_Q, variant.varlen, chain, packed=packed)
    if thirds:
        dk_output, dv_output = rows_from_registers(variant.D, D), rows_from_registers(variant.Dv, Dv)
    else:
        dk_output = rows_output(dk_stored, variant.dtype, variant.D, D, 0, config.consumers)
        dv_output = rows_output(dv_stored, variant.dtype, variant.Dv, Dv, tiles.v_at, config.consumers)
    to_type, x_type = keys_to_type(variant, dk_stored, dv_stored), gradient_inputs_type(variant)
    last = dv_output if dv_stored == "boxes" else dk_output  # copies of both form one group

    @kernel(MAPS_TYPE, bias.maps_type, to_type, x_type, tiled_work_type(variant), threads=role.threads)
    def flash_attention_dkv_sm90(maps, bias_maps, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        kv_full, q_bars, do_full = kv_once.barrier(), q_pipe.barriers(), do_part.barriers()
        slots = columns.slots()
        warpgroup = my_warpgroup()
        scale, options = work.scale, work.options
        task = task_of(cuda.blockIdx.x, work)
        if task.n0 >= task.Sk:
            return
        if cuda.threadIdx.x == 0:
            kv_once.init(kv_full)
            q_pipe.init(q_bars)
            do_part.init(do_full)
        prefetch_maps(maps, 1)
        bias.prefetch(bias_maps)
        q_pipe.start()
        i, end = u32(0), visits.count(task, work)
        if warpgroup == config.consumers:
            role.produce()
            load(LoadTo(smem, slots, bias_maps), maps, LoadBarriers(kv_full, q_bars, do_full), x, work, task, end)
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            n = i32(task.n0 + ROWS * warpgroup)
            dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
            scores, d_probs, packed = kq.fragment(), vdo.fragment(), pdo.left()
            factors, words, seed = (scale, score.units(scale)[0]), bias.words(), score.seed(options)
            if end != u32(0):
                kv_once.wait(kv_full)
                k_at, v_at, adds = k_tile.at(0), v_tile.at(0), i32(0)
                dk_sums, dv_sums = dsq.sums(dk_acc), pdo.sums(dv_acc)
                tile = visits.first(task, work)
                while i != end:
                    where = where_of(task, tile.h, tile.m0, n)
                    stage = q_pipe.wait(q_bars, i)
                    kq.start(scores, smem, k_at, q_tile.at(stage), warpgroup)  # S.T = K @ Q.T
                    do_part.wait(do_full, i)
                    vdo.start(d_probs, smem, v_at, do_tile.at(stage), warpgroup)  # dP.T = V @ dO.T
                    kept, seen = score.keeps(options, where, seed), score.sees(score.ask(options, where))
                    picks = visits.picks(options, where, tile)
                    kq.wait_but_one(scores)
                    if i != u32(0):
                        do_part.leave()
                        q_pipe.release(q_bars, i - 1)
                    held = bias.held(smem, stage, words)
                    visits.finish_held(scores, held, options, scale, where, seen, picks)
                    given = Given(options, factors, where, held)
                    gradient.probabilities(packed, scores, given, kept, (slots, columns.lse(stage)))
                    pdo.add(dv_sums, packed, smem, do_tile.at(stage), adds)  # dv [64, Dv] += P.T @ dO
                    if OVERLAP:
                        vdo.wait_but_one(d_probs)
                    else:
                        pdo.wait(dv_sums)
                        vdo.wait(d_probs)
                    gradient.d_scores(d_probs, scores, options, kept, (slots, columns.delta(stage)))
                    if OVERLAP:
                        pdo.wait(dv_sums)
                    pdo.collect(dv_acc, dv_sums)
                    gradient.pack(packed, d_probs)
                    dsq.add(dk_sums, packed, smem, q_tile.at(stage), adds)  # dk [64, D] += dS.T @ Q
                    dsq.finish(dk_acc, dk_sums)
                    adds = i32(1)
                    tile = visits.after(tile, i, end, task, work)
                    i = q_pipe.next(i)
                dsq.wait(dk_sums)
            else:
                for e in range(dsq.size):
                    dk_acc[e] = num.zero
                for e in range(pdo.size):
                    dv_acc[e] = num.zero
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            hidden.repair(dk_acc, dv_acc, x, task, i32(ROWS * warpgroup), work)
            for e in range(dsq.size):
                dk_acc[e] *= scale
            rows = key_rows_of(task)
            dk_output.store(smem, to.dk_map, to.dk, dk_acc, rows, i32(ROWS * warpgroup), i32(0))
            dv_output.store(smem, to.dv_map, to.dv, dv_acc, rows, i32(ROWS * warpgroup), i32(0))
            last.finish()

    return flash_attention_dkv_sm90
