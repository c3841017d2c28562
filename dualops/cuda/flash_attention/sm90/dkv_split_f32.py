"""dk and dv of float32's wide heads on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

Each number is three of bfloat16, each product six (`tile.split_bf16x3`). What products bring is added up by threads, as
tensor cores round toward zero: beside dk or dv of 128 columns, and as many numbers that are added to it, a warpgroup
has no registers for the other one. So of a block's 64 keys one has dv, the other dk, as in `dkv_split`:

    producer                     warpgroup 0, whose dv is             warpgroup 1, whose dk is
    1  one thread loads          3  wait for K and V                  3  the same
       K and V                   for each tile:                       for each tile:
    2  for each query head of    4  S.T [64, BLOCK_Q] = K @ Q.T       4  dP.T [64, BLOCK_Q] = V @ dO.T
       the group, for each       5  S.T through the options; P.T =    5  it gets P.T * slope;
       tile of queries that         exp2(S.T - lse), 0 where a           dS.T = P.T * slope *
       see some of the keys:        mask is; P.T * slope is handed       (weight * dP.T - delta)
       it loads Q and dO, and       over
       a warp brings lse and     6  sums = weight * P.T @ dO          6  sums = dS.T @ Q
       delta                     7  dv [64, Dv] += sums               7  dk [64, D] += sums
                                 8  dv goes to memory                 8  dk *= scale, and goes to memory

A warpgroup waits for each of its products, and meanwhile the other one has some under way: warpgroup 1 is behind, as it
needs P. A tile of 48 queries has 36 KiB of Q and as many of dO, so that there is room for three, and Q has two stages:
it is needed until the last product, dO until 4 of the one and 6 of the other are over.

A tile that sees no key is not loaded, and masks are looked at in tiles alone that they cut (`q_tiles`). A P.T of 0
times a NaN in Q or dO is a NaN, also where a mask hides it: a row that is not finite is made anew (`nan_repair_keys`).

Shared memory: `DkvThirdsConfig.tiles`, 6 * (64 * (D + Dv) + BLOCK_Q * (stages * D + do_stages * Dv)) + 256 * BLOCK_Q
bytes. Registers: BLOCK_Q / 2 of S.T or dP.T, BLOCK_Q * 3 / 4 of that in thirds, twice the larger of D / 2 and Dv / 2,
and about 30; BLOCK_Q / 2 more where options have slopes.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, i32, kernel, u8, u32
from ...tile.boxes import box_tile, prefetch_maps
from ...tile.pipeline import pipeline
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..load_once import load_once
from ..lse_delta_smem import lse_delta_of
from ..nan_repair_keys import nan_repair_keys
from ..options import chain_of
from ..split_gradient import split_gradient
from ..tile_scheduler import key_rows_of, walk_by_keys
from ..tiles import Where
from .arguments import MAPS_TYPE, keys_to_type, tiled_work_type
from .config import factors, padded
from .dkv_config import CONSUMERS_APART, DkvThirdsConfig
from .dkv_loads import LoadedTiles, loads_f32_of, statistics_of
from .output import rows_from_registers
from .q_tiles import q_tiles_of
from .split_probs import split_probs


@builds
def build_dkv_split_f32(config: DkvThirdsConfig, variant: Variant, packed: bool = False) -> Kernel:
    """flash_attention_dkv_split_f32_sm90(maps, to, x, work), with the records of `build_dkv`."""
    D, Dv, BLOCK_Q = padded(variant.D), padded(variant.Dv), config.block_q
    chain, role = chain_of(variant.having, variant.dtype, gradient=True), roles(CONSUMERS_APART)
    warps, tiles, dtype = 4 * CONSUMERS_APART, config.tiles(D, Dv), factors(variant.dtype)
    k_tile, v_tile = box_tile(tiles.k, 0, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_tile, do_tile = box_tile(tiles.q, tiles.q_at, 2), box_tile(tiles.do, tiles.do_at, 2)
    kv_once = load_once(tiles.k.nbytes + tiles.v.nbytes)
    q_pipe = pipeline(config.stages, tiles.q.nbytes, warps)
    do_pipe = pipeline(config.do_stages, tiles.do.nbytes, warps)
    statistics = second_barrier(config.stages, 0)  # lse and delta, beside Q
    kq = warpgroup_mma(dtype, tiles.k, tiles.q, True, from_base=True)
    vdo = warpgroup_mma(dtype, tiles.v, tiles.do, True, from_base=True)
    pdo = register_mma(dtype, tiles.do_steps, True, from_base=True)
    dsq = register_mma(dtype, tiles.q_steps, True, from_base=True)
    score = fragment_scores(chain, ROWS, BLOCK_Q, bent=chain.bends, transposed=True, others=variant.varlen)
    columns = lse_delta_of(config, chain)
    box = warpgroup_exchange(tiles.p_at, kq.size, config.places, exact=True)
    gradient = split_gradient(chain, score, variant.dtype, BLOCK_Q, box)
    hidden_dk, hidden_dv = nan_repair_keys(chain, variant, dsq.size, 0), nan_repair_keys(chain, variant, 0, pdo.size)
    visits = q_tiles_of(BLOCK_Q, variant, score)
    hand_probs, take_probs = split_probs(chain, score, visits, gradient, box)
    load = loads_f32_of(LoadedTiles(k_tile, v_tile, q_tile, do_tile), kv_once, q_pipe, do_pipe, visits, variant.varlen)
    bring = statistics_of(q_pipe, statistics, columns, visits)
    task_of, ZERO = walk_by_keys(ROWS, BLOCK_Q, variant.varlen, chain, packed=packed), i32(0)
    to_type = keys_to_type(variant, "", "")
    dk_output, dv_output = rows_from_registers(variant.D, D), rows_from_registers(variant.Dv, Dv)

    @kernel(MAPS_TYPE, to_type, gradient_inputs_type(variant), tiled_work_type(variant), threads=role.threads)
    def flash_attention_dkv_split_f32_sm90(maps, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        kv_full, q_bars, do_bars = kv_once.barrier(), q_pipe.barriers(), do_pipe.barriers()
        known, p_bars, slots = statistics.barriers(), box.barriers(), columns.slots()
        warpgroup = my_warpgroup()
        extent, scale, lengths, options = work
        group = extent.group
        task = task_of(cuda.blockIdx.x, extent, lengths, options)
        if task.n0 >= task.Sk:
            return
        if cuda.threadIdx.x == 0:
            kv_once.init(kv_full)
            q_pipe.init(q_bars)
            do_pipe.init(do_bars)
            statistics.init(known)
            box.init(p_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        i, end = u32(0), visits.count(task, group, options)
        h, m0, full = visits.first(task, group, options)
        if warpgroup == CONSUMERS_APART:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                load(smem, maps, (kv_full, q_bars, do_bars), (group, options), task, (h, m0), end)
            elif u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                bring(slots, (q_bars, known), (x.lse, x.delta), (group, options), task, (h, m0), end)
        elif warpgroup == 0:
            role.consume()
            end, base = u32(shfl_idx_i32(i32(end), 0, FULL_WARP)), base_of(smem)
            dv_acc, scores, packed = pdo.fragment(), kq.fragment(), pdo.left()
            bent, factors = kq.fragment(), (scale, score.units(scale)[0])
            sums = pdo.sums(dv_acc)
            if end != u32(0):
                kv_once.wait(kv_full)
            while i != end:
                stage = q_pipe.wait(q_bars, i)
                kq.start(scores, base, k_tile.at(0), q_tile.at(stage), ZERO)  # S.T = K @ Q.T
                statistics.wait(known, i)
                where = Where(task.b, h, m0, task.n0, task.Sq, task.Sk, task.offset)
                picks, place = visits.picks(options, where, full), (slots, columns.lse(stage))
                h, m0, full = visits.after(h, m0, i, end, task, group, options)
                kq.wait(scores)
                hand_probs(smem, p_bars, i, scores, picks, bent, place, factors, options, where)
                q_pipe.release(q_bars, i)  # lanes have met as they handed P over
                gradient.pack(packed, scores)
                pdo.add(sums, packed, base, do_tile.at(do_pipe.wait(do_bars, i)), ZERO)
                pdo.finish(dv_acc, sums)  # dv [64, Dv] += P.T @ dO
                do_pipe.release(do_bars, i)
                i = q_pipe.next(i)
            task = task_of(opaque_i32(cuda.blockIdx.x), extent, lengths, options)  # again: no register kept it
            hidden_dv.repair(dv_acc, dv_acc, x, task, ZERO, group, scale, options)
            dv_output.store(smem, to.dv_map, to.dv, dv_acc, key_rows_of(task), ZERO, ZERO)
        else:
            role.consume()
            end, base = u32(shfl_idx_i32(i32(end), 0, FULL_WARP)), base_of(smem)
            dk_acc, d_probs, packed = dsq.fragment(), vdo.fragment(), dsq.left()
            sums = dsq.sums(dk_acc)
            if end != u32(0):
                kv_once.wait(kv_full)
            while i != end:
                vdo.start(d_probs, base, v_tile.at(0), do_tile.at(do_pipe.wait(do_bars, i)), ZERO)  # dP.T = V @ dO.T
                where, stage = Where(task.b, h, m0, task.n0, task.Sq, task.Sk, task.offset), q_pipe.stage(i)
                h, m0, full = visits.after(h, m0, i, end, task, group, options)
                vdo.wait(d_probs)
                do_pipe.release(do_bars, i)
                take_probs(smem, p_bars, i, d_probs, (slots, columns.delta(stage)), options, where)
                box.leave(p_bars, i)
                gradient.pack(packed, d_probs)
                dsq.add(sums, packed, base, q_tile.at(stage), ZERO)  # there, as P was made of it
                dsq.finish(dk_acc, sums)  # dk [64, D] += dS.T @ Q
                q_pipe.release(q_bars, i)
                i = q_pipe.next(i)
            task = task_of(opaque_i32(cuda.blockIdx.x), extent, lengths, options)  # again: no register kept it
            hidden_dk.repair(dk_acc, dk_acc, x, task, ZERO, group, scale, options)
            for e in range(dsq.size):
                dk_acc[e] *= scale
            dk_output.store(smem, to.dk_map, to.dk, dk_acc, key_rows_of(task), ZERO, ZERO)

    return flash_attention_dkv_split_f32_sm90
