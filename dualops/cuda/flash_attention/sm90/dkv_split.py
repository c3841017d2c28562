"""dk and dv of wide heads on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

A block has 64 keys of one key head, and visits all queries that see them, one tile of BLOCK_Q queries after another, so
that every sum has one owner and one order. Rows are keys, columns queries. dk and dv of 256 columns take 128 registers
of a thread each. So one warpgroup has dv and the other dk, and P passes from one to the other:

    producer                     warpgroup 0, with dv                 warpgroup 1, with dk
    1  one thread loads          3  wait for K and V                  3  the same
       K and V                   for each tile:                       for each tile:
    2  for each query head of    4  S.T [64, BLOCK_Q] = K @ Q.T       4  dP.T [64, BLOCK_Q] = V @ dO.T the group, for
       each       5  overlapped: dv [64, Dv] +=        5  overlapped: dk [64, D] += tile of queries that         P.T @
       dO of the previous tile        dS.T @ Q of the previous tile see some of the keys:     6  after 4, overlapped
       with 5: S.T   6  after 4, overlapped with 5: it gets P.T * slope; it loads Q and dO, and       through the
       options; P.T =           dS.T = P.T * slope * (weight * dP.T - delta) a warp loads lse and         exp2(S.T -
       lse), 0 if masked; delta                        it hands P.T * slope over 7  weight * P.T is rounded           7
       dS.T is rounded 8  dv leaves through V's place       8  dk *= scale; dk leaves through K's place

Both multiply D + Dv columns a tile, whatever D and Dv are. Shared memory is nearly saturated: at 256 columns a tile of
48 queries takes 1,536 clocks of tensor cores, which read for 1,280 clocks; copies write for 384, and P takes 96, as
float16 (`tile.warpgroup_exchange`). As bfloat16, P would be rounded before dS is: dk then has 1.2 times the baseline's
error, and single elements more than twice.

float32 (`build_dkv_split_f32`) has three parts of bfloat16 for each number, and six products for each
(`tile.split_bf16x3`). Tensor cores round sums toward zero, so threads add them: dk or dv of 128 columns, and the sums
to add, take all registers of a warpgroup. Here a warpgroup waits for each of its products, while the other one's run. A
tile of 48 queries has 36 KiB of Q and as many of dO, so that three fit: Q has two stages, since the last product needs
it.

Tiles that no key is seen from are not loaded, and masks are evaluated only in tiles that they cut (`visible_tiles`). A
P.T of 0 times a NaN in Q or dO is NaN even if a mask hides it: rows that are not finite are recomputed (`nan_repair`).

Shared memory: `DkvApartConfig.tiles`, 2 * (D + Dv) * (64 + stages * BLOCK_Q) + places * 128 * BLOCK_Q bytes, twice the
latter if P is exact; `DkvThirdsConfig.tiles`, 6 * (64 * (D + Dv) + BLOCK_Q * (stages * D + do_stages * Dv)) + 256 *
BLOCK_Q. Registers: BLOCK_Q / 2 of S.T or dP.T, half of that packed, which `overlap` keeps meanwhile (float32: BLOCK_Q *
3 / 4 in parts), the larger of D / 2 and Dv / 2 (float32: twice that), and about 30; BLOCK_Q / 2 more for slopes.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u8, u32, verb
from ...tile.boxes import box_tile, prefetch_maps
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.warpgroup import ROWS, base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ...tile.warpgroup_exchange import Handover, warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import FragmentScores, fragment_scores
from ..lse_delta_smem import lse_delta_of
from ..nan_repair import nan_repair_keys
from ..options import OptionChain, chain_of
from ..score_gradients import GradientApart, split_gradient
from ..score_mod import Given
from ..tile_scheduler import key_rows_of, tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, keys_to_type
from .bias import bias_dkv
from .config import factors, padded
from .dkv_config import CONSUMERS_APART, DkvApartConfig, DkvThirdsConfig
from .dkv_loads import LoadBarriers, LoadedTiles, LoadTo, load_once, loads_f32_of, loads_of, statistics_of
from .output import rows_from_registers, rows_output
from .visible_tiles import q_tiles_of


def split_probs(
    chain: OptionChain, score: FragmentScores, gradient: GradientApart, box: Handover
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two verbs: (smem, bars, i, scores, bent, place, given), for the warpgroup with dv, and (smem, bars, i,
    d_probs, place, options, where), for the one with dk.
    """
    BENDS = chain.bends

    @verb
    def hand_probs(smem, bars, i, scores, bent, place, given):
        """Turn S.T into P.T, hand P.T * slope over, and turn P.T into weight * P.T."""
        gradient.probabilities(scores, bent, given, place)
        probs_at = box.claim(bars, i)
        if BENDS:
            box.put(smem, probs_at, bent)
        else:
            box.put(smem, probs_at, scores)
        box.hand(bars, i)
        gradient.weigh(scores, given.options, score.keeps(given.options, given.where, score.seed(given.options)))

    @verb
    def take_probs(smem, bars, i, d_probs, place, options, where):
        """Turn dP.T into dS.T."""
        gradient.weigh(d_probs, options, score.keeps(options, where, score.seed(options)))
        gradient.d_scores(d_probs, smem, box.take(bars, i), place)

    return hand_probs, take_probs


@builds
def build_dkv_split(
    config: DkvApartConfig, variant: Variant, dk_stored: str, dv_stored: str, packed: bool = False
) -> Kernel:
    """flash_attention_dkv_split_sm90(maps, to, x, work), with the records of `build_dkv`. Raises ValueError for options
    with slopes if the Config is not exact.
    """
    D, Dv, BLOCK_Q, num = padded(variant.D), padded(variant.Dv), config.block_q, numbers(f32)
    chain, role = chain_of(variant.having, variant.dtype, gradient=True), roles(CONSUMERS_APART, most=True)
    if chain.bends and not config.exact:
        raise ValueError(f"{config} for options with slopes, expected an exact one: P * slope may be large")
    warps, tiles = 4 * CONSUMERS_APART, config.tiles(D, Dv)
    k_tile, v_tile = box_tile(tiles.k, 0, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_tile, do_tile = box_tile(tiles.q, tiles.q_at, 2), box_tile(tiles.do, tiles.do_at, 2)
    kv_once, q_pipe = load_once(tiles.k.nbytes + tiles.v.nbytes), pipeline(config.stages, tiles.q.nbytes, warps)
    do_part = second_barrier(config.stages, tiles.do.nbytes, writers=1)  # with lse and delta
    kq, vdo = warpgroup_mma(variant.dtype, tiles.k, tiles.q), warpgroup_mma(variant.dtype, tiles.v, tiles.do)
    pdo, dsq = register_mma(variant.dtype, tiles.do_steps), register_mma(variant.dtype, tiles.q_steps)
    score = fragment_scores(chain, ROWS, BLOCK_Q, bent=chain.bends, transposed=True, others=variant.varlen)
    columns = lse_delta_of(config.block_q, config.stages, chain)
    box = warpgroup_exchange(tiles.p_at, kq.size, config.places, config.exact)
    gradient = split_gradient(chain, score, variant.dtype, BLOCK_Q, box)
    both, ZERO, ONE = warpgroup_barrier(CONSUMERS_APART), i32(0), i32(1)
    hidden_dk, hidden_dv = nan_repair_keys(chain, variant, dsq.size, 0), nan_repair_keys(chain, variant, 0, pdo.size)
    loaded = LoadedTiles(k_tile, v_tile, q_tile, do_tile)
    visits = q_tiles_of(BLOCK_Q, variant, score)
    load = loads_of(
        loaded, bias_dkv(variant, None, 0, warps), kv_once, q_pipe, do_part, columns, visits, variant.varlen
    )
    task_of = walk_by_keys(ROWS, BLOCK_Q, variant.varlen, chain, packed=packed)
    dk_output = rows_output(dk_stored, variant.dtype, variant.D, D, -tiles.k.box, 1)  # warpgroup 1 is a box further
    dv_output = rows_output(dv_stored, variant.dtype, variant.Dv, Dv, tiles.v_at, 1)
    hand_probs, take_probs = split_probs(chain, score, gradient, box)
    OVERLAP, to_type = config.overlap, keys_to_type(variant, dk_stored, dv_stored)

    @kernel(MAPS_TYPE, to_type, gradient_inputs_type(variant), tiled_work_type(variant), threads=role.threads)
    def flash_attention_dkv_split_sm90(maps, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        kv_full, q_bars, do_full, p_bars = kv_once.barrier(), q_pipe.barriers(), do_part.barriers(), box.barriers()
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
            box.init(p_bars)
        prefetch_maps(maps, 1)
        q_pipe.start()
        i, end, tile = u32(0), visits.count(task, work), visits.first(task, work)
        if warpgroup == CONSUMERS_APART:
            role.produce()
            load(LoadTo(smem, slots, ()), maps, LoadBarriers(kv_full, q_bars, do_full), x, work, task, end)
        elif warpgroup == 0:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            dv_acc, scores, packed = pdo.fragment(), kq.fragment(), pdo.left()
            bent, factors = kq.fragment(), (scale, score.units(scale)[0])
            for e in range(pdo.size):
                dv_acc[e] = num.zero
            if end != u32(0):
                kv_once.wait(kv_full)
                k_at, stage = k_tile.at(0), q_pipe.wait(q_bars, i)
                kq.start(scores, smem, k_at, q_tile.at(stage), ZERO)
                do_part.wait(do_full, i)
                where = where_of(task, tile.h, tile.m0, task.n0)
                picks = visits.picks(options, where, tile)
                kq.wait(scores)
                visits.finish(scores, options, scale, where, picks)
                given = Given(options, factors, where, 0)
                hand_probs(smem, p_bars, i, scores, bent, (slots, columns.lse(stage)), given)
                gradient.pack(packed, scores)
                tile = visits.after(tile, i, end, task, work)
                i = q_pipe.next(i)
                while i != end:
                    stage, before = q_pipe.wait(q_bars, i), q_pipe.stage(i - 1)
                    kq.start(scores, smem, k_at, q_tile.at(stage), ZERO)  # S.T = K @ Q.T
                    pdo.add(dv_acc, packed, smem, do_tile.at(before), ONE)  # dv [64, Dv] += P.T @ dO, previous tile
                    do_part.wait(do_full, i)
                    where = where_of(task, tile.h, tile.m0, task.n0)
                    picks = visits.picks(options, where, tile)
                    if OVERLAP:
                        kq.wait_but_one(scores)
                    else:
                        kq.wait(scores)
                    visits.finish(scores, options, scale, where, picks)
                    given = Given(options, factors, where, 0)
                    hand_probs(smem, p_bars, i, scores, bent, (slots, columns.lse(stage)), given)
                    kq.wait(scores)  # for dv, too: P.T is rounded after it
                    do_part.leave()
                    q_pipe.release(q_bars, i - 1)
                    gradient.pack(packed, scores)
                    tile = visits.after(tile, i, end, task, work)
                    i = q_pipe.next(i)
                pdo.add(dv_acc, packed, smem, do_tile.at(q_pipe.stage(i - 1)), ONE)
                pdo.wait(dv_acc)
                both.gather()  # dv goes where V was
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            hidden_dv.repair(dv_acc, dv_acc, x, task, ZERO, work)
            dv_output.store(smem, to.dv_map, to.dv, dv_acc, key_rows_of(task), ZERO, ZERO)
            dv_output.finish()
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            dk_acc, d_probs, packed = dsq.fragment(), vdo.fragment(), dsq.left()
            for e in range(dsq.size):
                dk_acc[e] = num.zero
            if end != u32(0):
                kv_once.wait(kv_full)
                v_at, stage = v_tile.at(0), q_pipe.wait(q_bars, i)
                do_part.wait(do_full, i)
                vdo.start(d_probs, smem, v_at, do_tile.at(stage), ZERO)
                vdo.wait(d_probs)
                where = where_of(task, tile.h, tile.m0, task.n0)
                take_probs(smem, p_bars, i, d_probs, (slots, columns.delta(stage)), options, where)
                do_part.leave()
                box.free(p_bars, i)
                gradient.pack(packed, d_probs)
                tile = visits.after(tile, i, end, task, work)
                i = q_pipe.next(i)
                while i != end:
                    stage, before = q_pipe.wait(q_bars, i), q_pipe.stage(i - 1)
                    do_part.wait(do_full, i)
                    vdo.start(d_probs, smem, v_at, do_tile.at(stage), ZERO)  # dP.T = V @ dO.T
                    dsq.add(dk_acc, packed, smem, q_tile.at(before), ONE)  # dk [64, D] += dS.T @ Q, previous tile
                    if OVERLAP:
                        vdo.wait_but_one(d_probs)
                    else:
                        vdo.wait(d_probs)
                    where = where_of(task, tile.h, tile.m0, task.n0)
                    take_probs(smem, p_bars, i, d_probs, (slots, columns.delta(stage)), options, where)
                    vdo.wait(d_probs)  # for dk, too: dS.T is rounded after it
                    do_part.leave()
                    box.free(p_bars, i)
                    q_pipe.release(q_bars, i - 1)
                    gradient.pack(packed, d_probs)
                    tile = visits.after(tile, i, end, task, work)
                    i = q_pipe.next(i)
                dsq.add(dk_acc, packed, smem, q_tile.at(q_pipe.stage(i - 1)), ONE)
                dsq.wait(dk_acc)
                both.gather()  # dk goes where K was
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            hidden_dk.repair(dk_acc, dk_acc, x, task, ZERO, work)
            for e in range(dsq.size):
                dk_acc[e] *= scale
            dk_output.store(smem, to.dk_map, to.dk, dk_acc, key_rows_of(task), ZERO, ZERO)
            dk_output.finish()

    return flash_attention_dkv_split_sm90


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
    statistics = second_barrier(config.stages, 0)  # lse and delta, with Q
    kq = warpgroup_mma(dtype, tiles.k, tiles.q, True, from_base=True)
    vdo = warpgroup_mma(dtype, tiles.v, tiles.do, True, from_base=True)
    pdo = register_mma(dtype, tiles.do_steps, True, from_base=True)
    dsq = register_mma(dtype, tiles.q_steps, True, from_base=True)
    score = fragment_scores(chain, ROWS, BLOCK_Q, bent=chain.bends, transposed=True, others=variant.varlen)
    columns = lse_delta_of(config.block_q, config.stages, chain)
    box = warpgroup_exchange(tiles.p_at, kq.size, config.places, exact=True)
    gradient = split_gradient(chain, score, variant.dtype, BLOCK_Q, box)
    hidden_dk, hidden_dv = nan_repair_keys(chain, variant, dsq.size, 0), nan_repair_keys(chain, variant, 0, pdo.size)
    visits = q_tiles_of(BLOCK_Q, variant, score)
    hand_probs, take_probs = split_probs(chain, score, gradient, box)
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
        scale, options = work.scale, work.options
        task = task_of(cuda.blockIdx.x, work)
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
        i, end, tile = u32(0), visits.count(task, work), visits.first(task, work)
        if warpgroup == CONSUMERS_APART:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                load(smem, maps, LoadBarriers(kv_full, q_bars, do_bars), work, task, end)
            elif u32(cuda.threadIdx.x) % u32(128) // u32(32) == u32(1):
                bring(slots, q_bars, known, x, work, task, end)
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
                where = where_of(task, tile.h, tile.m0, task.n0)
                picks, place = visits.picks(options, where, tile), (slots, columns.lse(stage))
                tile = visits.after(tile, i, end, task, work)
                kq.wait(scores)
                visits.finish(scores, options, scale, where, picks)
                hand_probs(smem, p_bars, i, scores, bent, place, Given(options, factors, where, 0))
                q_pipe.release(q_bars, i)  # handing P over has synchronized the lanes
                gradient.pack(packed, scores)
                pdo.add(sums, packed, base, do_tile.at(do_pipe.wait(do_bars, i)), ZERO)
                pdo.finish(dv_acc, sums)  # dv [64, Dv] += P.T @ dO
                do_pipe.release(do_bars, i)
                i = q_pipe.next(i)
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            hidden_dv.repair(dv_acc, dv_acc, x, task, ZERO, work)
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
                where, stage = where_of(task, tile.h, tile.m0, task.n0), q_pipe.stage(i)
                tile = visits.after(tile, i, end, task, work)
                vdo.wait(d_probs)
                do_pipe.release(do_bars, i)
                take_probs(smem, p_bars, i, d_probs, (slots, columns.delta(stage)), options, where)
                box.leave(p_bars, i)
                gradient.pack(packed, d_probs)
                dsq.add(sums, packed, base, q_tile.at(stage), ZERO)  # Q has arrived: P was computed from it
                dsq.finish(dk_acc, sums)  # dk [64, D] += dS.T @ Q
                q_pipe.release(q_bars, i)
                i = q_pipe.next(i)
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            hidden_dk.repair(dk_acc, dk_acc, x, task, ZERO, work)
            for e in range(dsq.size):
                dk_acc[e] *= scale
            dk_output.store(smem, to.dk_map, to.dk, dk_acc, key_rows_of(task), ZERO, ZERO)

    return flash_attention_dkv_split_f32_sm90
