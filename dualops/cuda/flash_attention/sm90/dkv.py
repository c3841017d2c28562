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

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, i32, kernel, members, noun, u8, u32, verb
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..score_gradients import gradient_of_keys
from ..tile_scheduler import tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, keys_to_type
from .bias import chains_of
from .config import factors, widths
from .dkv_config import DkvConfig
from .loads import QLoads, q_loads
from .output import results_of_keys
from .tile_scores import scores_of_keys


class Mine(NamedTuple):
    """What a thread multiplies with."""

    smem: Any
    bars: Any
    warpgroup: Any
    scores: Any  # S.T
    d_probs: Any
    packed: Any  # P.T, then dS.T
    dk: Any
    dv: Any


@noun
def dkv_tiles(config: DkvConfig, variant: Variant, load: QLoads) -> Members:
    """The verbs of a block's tiles of queries."""
    chain, tile_chain = chains_of(variant, words=config.bias_in_boxes, gradient=True)
    tiles, dtype, thirds = config.tiles(*widths(variant)), factors(variant.dtype), config.thirds
    kq, vdo = warpgroup_mma(dtype, tiles.k, tiles.q, thirds), warpgroup_mma(dtype, tiles.v, tiles.do, thirds)
    pdo, dsq = register_mma(dtype, tiles.do_steps, thirds), register_mma(dtype, tiles.q_steps, thirds)
    word, others = load.bias.word, variant.varlen
    score = fragment_scores(tile_chain, config.block_q, bent=chain.bends, transposed=True, word=word, others=others)
    scores_of = scores_of_keys(score, load)
    gradient = gradient_of_keys(tile_chain, score, variant.dtype, config.block_q)
    OVERLAP, K_AT, V_AT = config.overlap, 0, tiles.v_at

    @verb
    def mine(smem, bars, warpgroup):
        """Return `Mine`; once in a kernel."""
        dk, dv, scores, d_probs = dsq.fragment(), pdo.fragment(), kq.fragment(), vdo.fragment()
        return Mine(smem, bars, warpgroup, scores, d_probs, pdo.left(), dk, dv)

    @verb
    def tile(own, mine, sums, where, tile, filling, adds):
        """Add a tile of queries to dk and dv. sums: of their products."""
        (dk_sums, dv_sums), stage = sums, load.q.wait(mine.bars.q, filling)
        kq.start(mine.scores, mine.smem, K_AT, load.q_at(stage), mine.warpgroup)  # S.T = K @ Q.T
        load.do.wait(mine.bars.do, filling)
        vdo.start(mine.d_probs, mine.smem, V_AT, load.do_at(stage), mine.warpgroup)  # dP.T = V @ dO.T
        known = scores_of.know(own, where, tile)
        kq.wait_but_one(mine.scores)
        if filling != u32(0):
            load.release(mine.bars, filling - 1)
        given = scores_of.mask(own, mine.scores, known, stage)
        gradient.probabilities(mine.packed, mine.scores, given, known.kept, load.lse(mine.bars, stage))
        pdo.add(dv_sums, mine.packed, mine.smem, load.do_at(stage), adds)  # dv [64, Dv] += P.T @ dO
        if OVERLAP:
            vdo.wait_but_one(mine.d_probs)
        else:
            pdo.wait(dv_sums)
            vdo.wait(mine.d_probs)
        gradient.d_scores(mine.d_probs, mine.scores, own.options, known.kept, load.delta(mine.bars, stage))
        if OVERLAP:
            pdo.wait(dv_sums)
        pdo.collect(mine.dv, dv_sums)
        gradient.pack(mine.packed, mine.d_probs)
        dsq.add(dk_sums, mine.packed, mine.smem, load.q_at(stage), adds)  # dk [64, D] += dS.T @ Q
        dsq.finish(mine.dk, dk_sums)

    @verb
    def sums(mine):
        """Return where products are added up."""
        return dsq.sums(mine.dk), pdo.sums(mine.dv)

    @verb
    def finish(sums):
        dsq.wait(sums[0])

    return members(locals(), scores_of=scores_of, sizes=(dsq.size, pdo.size), kv_at=(K_AT, V_AT))


@builds
def build_dkv(config: DkvConfig, variant: Variant, dk_stored: str, dv_stored: str, packed: bool = False) -> Kernel:
    """flash_attention_dkv_sm90(maps, bias_maps, to, x, work): `Maps`, one map of a bias as boxes or none, `KeysTo`,
    `GradientInputs`, `TiledWork`.

    dk_stored, dv_stored: how dk and dv get to memory (`output`). packed: as in `walk_by_keys`.
    """
    role, load = roles(config.consumers, most=True), q_loads(config, variant)
    tiles = dkv_tiles(config, variant, load)
    task_of = walk_by_keys(config, variant, packed=packed)
    stored = ("", "") if config.thirds else (dk_stored, dv_stored)
    results = results_of_keys(variant, tiles.sizes, tiles.kv_at, stored, config.consumers)

    @kernel(
        MAPS_TYPE,
        load.bias.maps_type,
        keys_to_type(variant, dk_stored, dv_stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_dkv_sm90(maps, bias_maps, to, x, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, warpgroup, task = load.barriers(), my_warpgroup(), task_of(cuda.blockIdx.x, work)
        if task.n0 >= task.Sk:
            return
        load.start(bars, maps, bias_maps)
        if warpgroup == config.consumers:
            role.produce()
            load.produce(smem, bars, maps, bias_maps, x, work, task)
        else:
            role.consume()
            i, end = u32(0), u32(shfl_idx_i32(i32(load.visits.count(task, work)), 0, FULL_WARP))
            row, own, mine = i32(ROWS * warpgroup), tiles.scores_of.own(smem, work), tiles.mine(smem, bars, warpgroup)
            if end != u32(0):
                load.wait_kv(bars)
                sums, adds, tile = tiles.sums(mine), i32(0), load.visits.first(task, work)
                while i != end:
                    where = where_of(task, tile.h, tile.m0, i32(task.n0 + row))
                    tiles.tile(own, mine, sums, where, tile, i, adds)
                    tile = load.visits.after(tile, i, end, task, work)
                    adds, i = i32(1), load.q.next(i)
                tiles.finish(sums)
            else:
                results.clear(mine.dk, mine.dv)
            task = task_of(opaque_i32(cuda.blockIdx.x), work)  # recomputed: no register kept it
            results.store(smem, to, (mine.dk, mine.dv), task, row, x, work)

    return flash_attention_dkv_sm90
