"""dk and dv of wide heads on Hopper's tensor cores. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

A block has 64 keys of one key head, and visits all queries that see them, one tile of BLOCK_Q queries after another, so
that every sum has one owner and one order. Rows are keys, columns queries. dk and dv of 256 columns take 128 registers
of a thread each. So one warpgroup has dv and the other dk, and P passes from one to the other:

    producer                     warpgroup 0, with dv                 warpgroup 1, with dk
    1  one thread loads          3  wait for K and V                  3  the same
       K and V                   for each tile:                       for each tile:
    2  for each query head of    4  S.T [64, BLOCK_Q] = K @ Q.T       4  dP.T [64, BLOCK_Q] = V @ dO.T
       the group, for each       5  overlapped: dv [64, Dv] +=        5  overlapped: dk [64, D] +=
       tile of queries that         P.T @ dO of the previous tile        dS.T @ Q of the previous tile
       see some of the keys:     6  after 4, overlapped with 5:       6  after 4, overlapped with 5:
       it loads Q and dO, and       S.T through the options;             it gets P.T * slope; dS.T =
       a warp loads lse and         P.T = exp2(S.T - lse), 0 if          P.T * slope * (weight * dP.T - delta)
       delta                        masked; P.T * slope is handed
                                    over
                                 7  weight * P.T is rounded           7  dS.T is rounded
                                 8  dv leaves through V's place       8  dk *= scale; dk leaves through K's place

Both multiply D + Dv columns a tile, whatever D and Dv are. Shared memory is nearly saturated: at 256 columns a tile of
48 queries takes 1,536 clocks of tensor cores, which read for 1,280 clocks; copies write for 384, and P takes 96, as
float16 (`tile.warpgroup_exchange`). As bfloat16, P would be rounded before dS is: dk then has 1.2 times the baseline's
error, and single elements more than twice.

float32 (`DkvApartConfig.thirds`) has three parts of bfloat16 for each number, and six products for each
(`tile.split_bf16x3`). Tensor cores round sums toward zero, so threads add them: dk or dv of 128 columns, and the sums
to add, take all registers of a warpgroup. Here a warpgroup waits for each of its products, while the other one's run. A
tile of 48 queries has 36 KiB of Q and as many of dO, so that three fit: Q has two stages, since the last product needs
it.

Masked tiles, and rows that are not finite: as in `dkv`.

Shared memory: `DkvApartConfig.tiles`, 2 * (D + Dv) * (64 + stages * BLOCK_Q) + places * 128 * BLOCK_Q bytes, twice the
latter if P is exact; for float32 6 * (64 * (D + Dv) + BLOCK_Q * (stages * D + do_stages * Dv)) + 256 *
BLOCK_Q. Registers: BLOCK_Q / 2 of S.T or dP.T, half of that packed, which `overlap` keeps meanwhile (float32: BLOCK_Q *
3 / 4 in parts), the larger of D / 2 and Dv / 2 (float32: twice that), and about 30; BLOCK_Q / 2 more for slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, i32, kernel, members, noun, u8, u32, verb
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import base_of, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ...tile.warpgroup_exchange import warpgroup_exchange
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..options import chain_of
from ..score_gradients import split_gradient
from ..tile_scheduler import tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, keys_to_type
from .config import factors, widths
from .dkv_config import CONSUMERS, DkvApartConfig
from .loads import q_loads
from .output import results_of_keys
from .tile_scores import scores_of_keys


class Side(NamedTuple):
    """What a warpgroup multiplies with."""

    smem: Any
    at: Any  # smem, or the base of descriptors
    bars: Any
    scores: Any  # S.T, or dP.T
    bent: Any  # P.T * slope, where it is not P.T
    packed: Any
    acc: Any
    sums: Any  # of products, which become acc


@noun
def split_tiles(config: DkvApartConfig, variant: Variant) -> Members:
    """The verbs of a block's tiles of queries: of 16 bits pipelined, of float32 one product after the other.

    Raises ValueError for options with slopes if the Config is not exact.
    """
    chain = chain_of(variant.having, variant.dtype, gradient=True)
    if chain.bends and not config.exact:
        raise ValueError(f"{config} for options with slopes, expected an exact one: P * slope may be large")
    BLOCK_Q, THIRDS, tiles = config.block_q, config.thirds, config.tiles(*widths(variant))
    dtype = factors(variant.dtype)
    kq = warpgroup_mma(dtype, tiles.k, tiles.q, THIRDS, from_base=THIRDS)
    vdo = warpgroup_mma(dtype, tiles.v, tiles.do, THIRDS, from_base=THIRDS)
    pdo = register_mma(dtype, tiles.do_steps, THIRDS, from_base=THIRDS)
    dsq = register_mma(dtype, tiles.q_steps, THIRDS, from_base=THIRDS)
    box = warpgroup_exchange(tiles.p_at, kq.size, config.places, config.exact)
    load = q_loads(config, variant, others=box)
    score = fragment_scores(chain, BLOCK_Q, bent=chain.bends, transposed=True, others=variant.varlen)
    scores_of = scores_of_keys(score, load, keeps=False)
    gradient = split_gradient(chain, score, variant.dtype, BLOCK_Q, box)
    both, ZERO, ONE, OVERLAP, BENDS = warpgroup_barrier(CONSUMERS), i32(0), i32(1), config.overlap, chain.bends

    @verb
    def hand_probs(side, filling, stage, given):
        """Turn S.T into P.T, hand P.T * slope over, and turn P.T into weight * P.T."""
        gradient.probabilities(side.scores, side.bent, given, load.lse(side.bars, stage))
        place = box.claim(side.bars.others, filling)
        box.put(side.smem, place, side.bent if BENDS else side.scores)
        box.hand(side.bars.others, filling)
        kept = score.keeps(given.options, given.where, score.seed(given.options))
        gradient.weigh(side.scores, given.options, kept)

    @verb
    def take_probs(side, filling, stage, options, where):
        """Turn dP.T into dS.T."""
        gradient.weigh(side.scores, options, score.keeps(options, where, score.seed(options)))
        probs_at = box.take(side.bars.others, filling)
        gradient.d_scores(side.scores, side.smem, probs_at, load.delta(side.bars, stage))

    def pipelined(*, first: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the verbs (own, side, task, tile, filling) of a tile, of dv and of dk: a product of the previous tile
        overlaps it. first: there is none.
        """
        FIRST, alone = first, first or not OVERLAP
        wait_scores, wait_d_probs = (mma.wait if alone else mma.wait_but_one for mma in (kq, vdo))

        @verb
        def dv_tile(own, side, task, tile, filling):
            stage = load.q.wait(side.bars.q, filling)
            kq.start(side.scores, side.at, load.k_at(0), load.q_at(stage), ZERO)  # S.T = K @ Q.T
            if not FIRST:  # dv [64, Dv] += P.T @ dO, of the previous tile
                pdo.add(side.acc, side.packed, side.at, load.do_at(load.q.stage(filling - 1)), ONE)
            load.do.wait(side.bars.do, filling)
            known = scores_of.know(own, where_of(task, tile.h, tile.m0, task.n0), tile)
            wait_scores(side.scores)
            hand_probs(side, filling, stage, scores_of.mask(own, side.scores, known, stage))
            if not FIRST:
                kq.wait(side.scores)  # for dv, too: P.T is rounded after it
                load.release(side.bars, filling - 1)
            gradient.pack(side.packed, side.scores)

        @verb
        def dk_tile(own, side, task, tile, filling):
            stage = load.q.wait(side.bars.q, filling)
            load.do.wait(side.bars.do, filling)
            vdo.start(side.scores, side.at, load.v_at(0), load.do_at(stage), ZERO)  # dP.T = V @ dO.T
            if not FIRST:  # dk [64, D] += dS.T @ Q, of the previous tile
                dsq.add(side.acc, side.packed, side.at, load.q_at(load.q.stage(filling - 1)), ONE)
            wait_d_probs(side.scores)
            take_probs(side, filling, stage, own.options, where_of(task, tile.h, tile.m0, task.n0))
            if not FIRST:
                vdo.wait(side.scores)  # for dk, too: dS.T is rounded after it
            load.part.leave()
            box.free(side.bars.others, filling)
            if not FIRST:
                load.q.release(side.bars.q, filling - 1)
            gradient.pack(side.packed, side.scores)

        return dv_tile, dk_tile

    @verb
    def dv_tile_of_parts(own, side, task, tile, filling):
        stage = load.q.wait(side.bars.q, filling)
        kq.start(side.scores, side.at, load.k_at(0), load.q_at(stage), ZERO)  # S.T = K @ Q.T
        load.part.wait(side.bars.known, filling)
        known = scores_of.know(own, where_of(task, tile.h, tile.m0, task.n0), tile)
        kq.wait(side.scores)
        hand_probs(side, filling, stage, scores_of.mask(own, side.scores, known, stage))
        load.q.release(side.bars.q, filling)  # handing P over has synchronized the lanes
        gradient.pack(side.packed, side.scores)
        pdo.add(side.sums, side.packed, side.at, load.do_at(load.do.wait(side.bars.do, filling)), ZERO)
        pdo.finish(side.acc, side.sums)  # dv [64, Dv] += P.T @ dO
        load.do.release(side.bars.do, filling)

    @verb
    def dk_tile_of_parts(own, side, task, tile, filling):
        do_at, stage = load.do_at(load.do.wait(side.bars.do, filling)), load.q.stage(filling)
        vdo.start(side.scores, side.at, load.v_at(0), do_at, ZERO)  # dP.T = V @ dO.T
        vdo.wait(side.scores)
        load.do.release(side.bars.do, filling)
        take_probs(side, filling, stage, own.options, where_of(task, tile.h, tile.m0, task.n0))
        box.leave(side.bars.others, filling)
        gradient.pack(side.packed, side.scores)
        dsq.add(side.sums, side.packed, side.at, load.q_at(stage), ZERO)  # Q has arrived: P was computed from it
        dsq.finish(side.acc, side.sums)  # dk [64, D] += dS.T @ Q
        load.q.release(side.bars.q, filling)

    def all_tiles(which: int, mma: Any, at: Callable[..., Any]) -> Callable[..., None]:
        """Return the verb (own, side, task, work, end) for `end` tiles: number `which` of the verbs above. mma: of the
        product that follows the last tile, whose right factor is `at` a stage.
        """
        first_tile, later_tile = pipelined(first=True)[which], pipelined(first=False)[which]
        of_parts = (dv_tile_of_parts, dk_tile_of_parts)[which]
        tile_after_first = of_parts if THIRDS else later_tile

        @verb
        def every(own, side, task, work, end):
            i, tile = u32(0), load.visits.first(task, work)
            if end != u32(0):
                load.wait_kv(side.bars)
                if not THIRDS:
                    first_tile(own, side, task, tile, i)
                    tile = load.visits.after(tile, i, end, task, work)
                    i = load.q.next(i)
                while i != end:
                    tile_after_first(own, side, task, tile, i)
                    tile = load.visits.after(tile, i, end, task, work)
                    i = load.q.next(i)
                if not THIRDS:
                    mma.add(side.acc, side.packed, side.at, at(load.q.stage(i - 1)), ONE)
                    mma.wait(side.acc)
                    both.gather_from_branches()  # results go where K and V were

        return every

    @verb
    def dv_side(smem, bars):
        """Return `Side`; once in a kernel."""
        acc, scores, bent, packed = pdo.fragment(), kq.fragment(), kq.fragment(), pdo.left()
        return Side(smem, base_of(smem) if THIRDS else smem, bars, scores, bent, packed, acc, pdo.sums(acc))

    @verb
    def dk_side(smem, bars):
        acc, d_probs, packed = dsq.fragment(), vdo.fragment(), dsq.left()
        return Side(smem, base_of(smem) if THIRDS else smem, bars, d_probs, d_probs, packed, acc, dsq.sums(acc))

    return members(
        locals(),
        load=load,
        own=scores_of.own,
        dv_tiles=all_tiles(0, pdo, load.do_at),  # verbs of `all_tiles`
        dk_tiles=all_tiles(1, dsq, load.q_at),
        dv_size=pdo.size,
        dk_size=dsq.size,
        dv_at=(0, tiles.v_at),  # where K and V begin, for `results_of_keys`
        dk_at=(-tiles.k.box, 0),  # a box further: the warpgroup of dk is the second
    )


@builds
def build_dkv_split(
    config: DkvApartConfig, variant: Variant, dk_stored: str = "", dv_stored: str = "", packed: bool = False
) -> Kernel:
    """flash_attention_dkv_split_sm90(maps, to, x, work), with the records of `build_dkv`; for float32
    flash_attention_dkv_split_f32_sm90. Raises ValueError for options with slopes if the Config is not exact.
    """
    stored = dk_stored, dv_stored
    role, tiles = roles(CONSUMERS, most=not config.thirds), split_tiles(config, variant)
    task_of = walk_by_keys(config, variant, packed=packed)
    dk_results = results_of_keys(variant, (tiles.dk_size, 0), tiles.dk_at, stored, 1)
    dv_results = results_of_keys(variant, (0, tiles.dv_size), tiles.dv_at, stored, 1)

    @kernel(
        MAPS_TYPE,
        keys_to_type(variant, *stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
        name=f"flash_attention_dkv_split_{'f32_' * config.thirds}sm90",
    )
    def flash_attention_dkv_split(maps, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, warpgroup, task = tiles.load.barriers(), my_warpgroup(), task_of(cuda.blockIdx.x, work)
        if task.n0 >= task.Sk:
            return
        tiles.load.start(bars, maps, ())
        if warpgroup == CONSUMERS:
            role.produce()
            tiles.load.produce(smem, bars, maps, (), x, work, task)
        elif warpgroup == 0:
            role.consume()
            end = u32(shfl_idx_i32(i32(tiles.load.visits.count(task, work)), 0, FULL_WARP))
            own, dv = tiles.own(smem, work), tiles.dv_side(smem, bars)
            dv_results.clear(dv.acc, dv.acc)
            tiles.dv_tiles(own, dv, task, work, end)
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            dv_results.store(smem, to, (dv.acc, dv.acc), task, i32(0), x, work)
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(tiles.load.visits.count(task, work)), 0, FULL_WARP))
            own, dk = tiles.own(smem, work), tiles.dk_side(smem, bars)
            dk_results.clear(dk.acc, dk.acc)
            tiles.dk_tiles(own, dk, task, work, end)
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            dk_results.store(smem, to, (dk.acc, dk.acc), task, i32(0), x, work)

    return flash_attention_dkv_split
