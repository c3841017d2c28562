"""dq, dk and dv of attention on Hopper's tensor cores in one kernel. Dao 2023 (arXiv:2307.08691), Alg. 2, in order.

A block has 128 keys of one key head, 64 for each of two consumer warpgroups, and visits all queries that see them, one
tile of BLOCK_Q queries after another (`dq_sums.TileOrder`). Rows are keys, columns queries, as in `dkv`, which has the
same products but the last: dq is a sum over the keys of many blocks.

    producers                                  consumers
    1  one thread loads K and V                3  wait for K and V
    2  for each query head of the group, for   for each tile, 64 queries at a time:
       each tile of queries that see some of   4  S.T [64, 64] = K @ Q.T, dP.T [64, 64] = V @ dO.T; overlapped with
       the keys: it loads Q and dO, and a         the second: P.T = exp2(S.T - lse)
       warp loads lse and delta                5  dv [64, Dv] += P.T @ dO, overlapped: dS.T = P.T * (dP.T - delta),
                                                  which goes, rounded, to shared memory; dk [64, D] += dS.T @ Q
                                               6  both warpgroups meet; dq [64, 64] = dS @ K, for all 128 keys, each its
                                                  columns or its queries; during the last dk it goes to shared memory
    8  a thread adds dq to its sum in memory   7  dk *= scale; dk leaves through K's place, dv through V's

A tile is 64 queries, or 128 for heads of 64; in both, each warpgroup has 64 x 64 of dq. For heads of 64, registers have
room for a warpgroup's K, and without options other than masks and sinks for its V; these are left factors of all tiles
(`products.register_a`). At 4, S.T goes through the options, is -inf if masked, and becomes P.T * slope in place;
dropout's mask is bits, computed while products run. A bias is copied as boxes with dO (`bias`); then dq has one place
less.

The sum of a tile's dq has one order, whichever blocks run when: number r waits for r others (`dq_sums.dq_queue`).
Blocks draw their work, a head's first keys before the next ones, and visit tiles from the last one on. So each waits
only for blocks that started earlier, and follows the previous one at a tile's distance. Or, with a causal mask or a
window, a head's last keys come first, and blocks visit tiles from the first one that sees their keys. Then, under a
causal mask, no block waits at its start, except near the first query, and the longest blocks come last
(`FusedConfig.ascends`). With `by_steps`, P.T of 16 queries is multiplied as soon as it is there, overlapped with the
next exponentials (`products.probs_by_steps`). dq lies in memory in the layout of registers; `dq_sums.build_dq_convert`
turns it into rows.

Varlen: rows after the last key are the next sequence's keys. They get dS = 0, since dq sums over them. Tiles are
packed (`tile_scheduler`), and so are dq's sums. So there are as many blocks and sums as tokens need, and a sequence has
the bits that it has alone.

Shared memory: `FusedConfig.tiles`, 2 * 128 * (D + Dv) + stages * 2 * BLOCK_Q * (D + Dv) + 512 * BLOCK_Q + dq_places *
32768 bytes, and stages * 256 * BLOCK_Q for a bias. Registers: 64 of S.T and dP.T (dq takes their place), half of that
for P.T and dS.T packed, D / 2 + Dv / 2 of dk and dv, D / 4 of a held K, Dv / 4 of a held V, and about 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, kernel, members, noun, u8, u32, verb
from ...ptx.warp import griddepcontrol_launch_dependents
from ...tile.epilogue import put_matrices
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..score_gradients import gradient_of_keys
from ..tile_scheduler import tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, SUMS_TYPE, keys_to_type
from .bias import chains_of
from .config import widths
from .dkv_config import CONSUMERS, DS_PLACES, FusedConfig
from .dq_sums import dq_queue, draw, tile_order
from .loads import QLoads, q_loads
from .output import results_of_keys
from .products import Factor, Registers, probs_at_once, probs_by_steps, register_a
from .tile_scores import scores_of_keys


class Mine(NamedTuple):
    """What a thread multiplies with."""

    smem: Any
    bars: Any
    warpgroup: Any
    k: Any  # words of K, if it is held
    v: Any
    scores: Any
    d_probs: Any  # then dq
    packed: Any  # P.T
    d_scores: Any  # packed dS.T
    dk: Any
    dv: Any


class Filling(NamedTuple):
    """A tile of queries in shared memory."""

    i: Any  # its number
    stage: Any
    q_at: Any
    do_at: Any
    ds_at: Any  # where its dS.T goes


@noun
def fused_tiles(config: FusedConfig, variant: Variant, load: QLoads) -> Members:
    """The verbs of a block's tiles of queries."""
    chain, tile_chain = chains_of(variant, words=config.bias_in_boxes, gradient=True)
    dtype, tiles = variant.dtype, config.tiles(*widths(variant))
    kq = register_a(dtype, tiles.k, tiles.part_q, held=config.k_held)
    vdo = register_a(dtype, tiles.v, tiles.part_do, held=config.v_held)
    pdo, dsq = register_mma(dtype, tiles.do_steps), register_mma(dtype, tiles.q_steps)
    dsk = warpgroup_mma(dtype, tiles.ds, tiles.k_columns)
    word, others = load.bias.word, variant.varlen
    score = fragment_scores(tile_chain, ROWS, bent=chain.bends, transposed=True, word=word, others=others)
    scores_of, gradient = scores_of_keys(score, load), gradient_of_keys(tile_chain, score, dtype, ROWS)
    stepwise = probs_by_steps(gradient, dtype, tiles.do_steps)
    probs = stepwise if config.by_steps else probs_at_once(gradient, pdo)
    put_scores = put_matrices(dtype, ROWS, recompute=chain.scores or chain.weighs)
    LAST, STATISTICS, K_AT, V_AT = config.parts - 1, 2 * ROWS // 8, 0, tiles.v_at
    Q_BYTES, DO_BYTES = tiles.part_q.nbytes, tiles.part_do.nbytes  # from one part to the next
    DS_AT, DS_BYTES = tiles.ds_at, tiles.ds.nbytes
    # for dq, the warpgroups have different queries, or different columns
    MY_QUERIES, MY_COLUMNS = (DS_BYTES, 0) if LAST else (0, tiles.k_columns.nbytes)

    @verb
    def mine(smem, bars, warpgroup):
        """Return `Mine`; once in a kernel."""
        dk, dv, scores, d_probs = dsq.fragment(), pdo.fragment(), kq.fragment(), vdo.fragment()
        packed, d_scores = probs.left(), dsq.left()
        return Mine(smem, bars, warpgroup, kq.words(), vdo.words(), scores, d_probs, packed, d_scores, dk, dv)

    @verb
    def begin(mine):
        """Wait for K and V."""
        load.wait_kv(mine.bars)
        kq.take(mine.k, mine.smem, K_AT, mine.warpgroup)
        vdo.take(mine.v, mine.smem, V_AT, mine.warpgroup)

    @verb
    def wait(mine, i):
        """Wait for Q of a tile. Return `Filling`."""
        stage = load.q.wait(mine.bars.q, i)
        ds_at = i32(DS_AT + i32(u32(i) % u32(DS_PLACES)) * (LAST + 1) * DS_BYTES)
        return Filling(i, stage, load.q_at(stage), load.do_at(stage), ds_at)

    @verb
    def _of_part(place, part):
        slots, at = place
        return slots, i32(at + i32(STATISTICS * part))

    @verb
    def add_dv(own, mine, filling, where, part, adds):
        """Add 64 queries of a tile to dv, and write their dS.T."""
        smem, stage, do_at = mine.smem, filling.stage, i32(filling.do_at + DO_BYTES * part)
        kq.start(mine.scores, mine.k, smem, K_AT, i32(filling.q_at + Q_BYTES * part), mine.warpgroup)  # S.T = K @ Q.T
        if part == 0:
            load.do.wait(mine.bars.do, filling.i)
        vdo.start(mine.d_probs, mine.v, smem, V_AT, do_at, mine.warpgroup)  # dP.T = V @ dO.T
        known = scores_of.know(own, where, 0)
        kq.wait_but_one(mine.scores)
        given = scores_of.mask(own, mine.scores, known, stage)
        registers, lse = Registers(mine.dv, mine.packed, mine.scores), _of_part(load.lse(mine.bars, stage), part)
        probs.add(registers, Factor(smem, do_at, adds), given, known.kept, lse)  # dv [64, Dv] += P.T @ dO
        vdo.wait_but(mine.d_probs, probs.groups)
        delta = _of_part(load.delta(mine.bars, stage), part)
        gradient.d_scores(mine.d_probs, mine.scores, own.options, known.kept, delta)
        gradient.forget_others(mine.d_probs, where)
        gradient.pack(mine.d_scores, mine.d_probs)
        at = i32(filling.ds_at + DS_BYTES * part + mine.warpgroup * (DS_BYTES // CONSUMERS))
        put_scores(smem, at, mine.d_probs)

    @verb
    def add_dk(mine, filling, part, adds):
        """Start dk [64, D] += dS.T @ Q, for 64 queries of a tile."""
        dsq.add(mine.dk, mine.d_scores, mine.smem, i32(filling.q_at + Q_BYTES * part), adds)

    @verb
    def start_dq(mine, filling):
        """Start dq [64, 64] = dS @ K."""
        ds_at, k_at = i32(filling.ds_at + mine.warpgroup * MY_QUERIES), i32(K_AT + mine.warpgroup * MY_COLUMNS)
        dsk.start(mine.d_probs, mine.smem, ds_at, k_at, 0)

    return members(
        locals(),
        scores_of=scores_of,
        both=warpgroup_barrier(CONSUMERS),
        wait_dq=dsk.wait_but_one,  # (d_probs)
        wait_dk=dsq.wait,  # (dk)
        wait_dv=pdo.wait,  # (dv)
        sizes=(dsq.size, pdo.size),  # of dk and dv
        kv_at=(K_AT, V_AT),
    )


@builds
def build_fused(config: FusedConfig, variant: Variant, dk_stored: str, dv_stored: str) -> Kernel:
    """flash_attention_fused_sm90(maps, bias_maps, sums, to, x, work): `Maps`, one map of a bias as boxes or none,
    `Sums`, `KeysTo`, `GradientInputs`, `TiledWork`. For varlen, `section` counts queries.

    dk_stored, dv_stored: how dk and dv get to memory (`output`).
    """
    role, order = roles(CONSUMERS, most=config.most), tile_order(config, variant)
    dq = dq_queue(config, variant, order)
    load = q_loads(config, variant, order, dq)
    tiles = fused_tiles(config, variant, load)
    results = results_of_keys(variant, tiles.sizes, tiles.kv_at, (dk_stored, dv_stored), CONSUMERS)
    task_of = walk_by_keys(config, variant, last_first=config.ascends, packed=variant.varlen)

    @kernel(
        MAPS_TYPE,
        load.bias.maps_type,
        SUMS_TYPE,
        keys_to_type(variant, dk_stored, dv_stored),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_fused_sm90(maps, bias_maps, sums, to, x, work):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        bars, drawn, warpgroup = load.barriers(), cuda.shared.array(1, i32), my_warpgroup()
        if cuda.threadIdx.x == 0:
            drawn[0] = draw(sums.flags)
            griddepcontrol_launch_dependents()
        load.start(bars, maps, bias_maps)
        task = task_of(drawn[0], work)
        if task.n0 >= task.Sk:
            return
        i, end, tile = u32(0), order.count(task, work), order.first(task, work)
        if warpgroup == CONSUMERS:
            role.produce()
            tid = u32(cuda.threadIdx.x) % u32(128)
            if tid == u32(0) and end != u32(0):
                load.copy(smem, bars, maps, bias_maps, work, task)
            elif tid // u32(32) == u32(1):
                load.fetch(bars, x, work, task)
            elif tid == u32(64):
                dq.add(floats, bars.others, sums, task, work)
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            row, own, mine = i32(ROWS * warpgroup), tiles.scores_of.own(smem, work), tiles.mine(smem, bars, warpgroup)
            n = i32(task.n0 + row)
            if end != u32(0):
                adds = i32(0)
                tiles.begin(mine)
                while i != end:
                    filling = tiles.wait(mine, i)
                    for part in range(config.parts):
                        where = where_of(task, tile.h, i32(tile.m0 + ROWS * part), n)
                        tiles.add_dv(own, mine, filling, where, part, adds)  # dv [64, Dv] += P.T @ dO; dS.T
                        if part < config.parts - 1:
                            tiles.add_dk(mine, filling, part, adds)  # dk [64, D] += dS.T @ Q
                            adds = i32(1)
                    tiles.both.meet()
                    tiles.start_dq(mine, filling)  # dq [64, 64] = dS @ K
                    tiles.add_dk(mine, filling, config.parts - 1, adds)
                    adds, tile = i32(1), order.after(tile, i, end, task, work)
                    tiles.wait_dq(mine.d_probs)
                    dq.put(floats, bars.others, i, mine.d_probs)
                    tiles.wait_dk(mine.dk)
                    load.release(bars, i)
                    i = load.q.next(i)
                tiles.wait_dv(mine.dv)
                tiles.both.gather()  # dk goes where K was
            else:
                results.clear(mine.dk, mine.dv)
            task = task_of(opaque_i32(drawn[0]), work)  # recomputed: no register kept it
            results.store(smem, to, (mine.dk, mine.dv), task, row, x, work)

    return flash_attention_fused_sm90
