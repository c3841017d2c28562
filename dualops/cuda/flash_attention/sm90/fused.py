"""dq, dk and dv of attention on Hopper's tensor cores in one kernel. Dao 2023 (arXiv:2307.08691), Alg. 2, in order.

A block has 128 keys of one key head, 64 for each of two consumer warpgroups, and visits all queries that see them, one
tile of BLOCK_Q queries after another (`dq_sums.TileOrder`). Rows are keys, columns queries, as in `dkv`, which has the
same products but the last: dq is a sum over the keys of many blocks.

    producers                                  consumers 1  one thread loads K and V                3  wait for K and V
    2  for each query head of the group, for   for each tile, 64 queries at a time: each tile of queries that see some
    of   4  S.T [64, 64] = K @ Q.T, dP.T [64, 64] = V @ dO.T; overlapped with the the keys: it loads Q and dO, and a
    second: P.T = exp2(S.T - lse) warp loads lse and delta                5  dv [64, Dv] += P.T @ dO, overlapped: dS.T =
    P.T * (dP.T - delta), which goes, rounded, to shared memory; dk [64, D] += dS.T @ Q
                                               6  both warpgroups meet; dq [64, 64] = dS @ K, for all 128 keys, each its
                                                  columns or its queries; during the last dk it goes to shared memory
    8  a thread adds dq to its sum in memory   7  dk *= scale; dk leaves through K's place, dv through V's

A tile is 64 queries, or 128 for heads of 64; in both, each warpgroup has 64 x 64 of dq. For heads of 64, registers have
room for a warpgroup's K, and without options other than masks and sinks for its V; these are left factors of all tiles
(`products.register_a`). At 4, S.T goes through the options, is -inf if masked, and becomes P.T * slope in place;
dropout's mask is bits, computed while products run. A bias is copied as boxes with dO (`bias`); then dq has one place
less.

The sum of a tile's dq has one order, whichever blocks run when: number r waits for r others (`dq_sums.ordered_sums`).
Blocks draw their work, a head's first keys before the next ones, and visit tiles from the last one on. So each waits
only for blocks that started earlier, and follows the previous one at a tile's distance. Or, under a causal mask, a
head's last keys come first, and blocks visit tiles from the first one that sees their keys: then no block waits at its
start, and the longest blocks come last (`FusedConfig.ascends`). With `by_steps`, P.T of 16 queries is multiplied as
soon as it is there, overlapped with the next exponentials (`products.probs_by_steps`). dq lies in memory in the layout
of registers; `dq_sums.build_dq_convert` turns it into rows.

Varlen: rows after the last key are the next sequence's keys. They get dS = 0, since dq sums over them. Tiles are
packed (`tile_scheduler`), and so are dq's sums. So there are as many blocks and sums as tokens need, and a sequence has
the bits that it has alone.

Shared memory: `FusedConfig.tiles`, 2 * 128 * (D + Dv) + stages * 2 * BLOCK_Q * (D + Dv) + 512 * BLOCK_Q + dq_places *
32768 bytes, and stages * 256 * BLOCK_Q for a bias. Registers: 64 of S.T and dP.T (dq takes their place), half of that
for P.T and dS.T packed, D / 2 + Dv / 2 of dk and dv, D / 4 of a held K, Dv / 4 of a held V, and about 16.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel, u8, u32, verb
from ...tile.boxes import Corner, box_tile, prefetch_maps
from ...tile.epilogue import put_matrices
from ...tile.grids import let_next_grid_begin
from ...tile.numbers import numbers
from ...tile.pipeline import pipeline
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.second_barrier import second_barrier
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..saved_lse import lse_delta_of
from ..score_gradients import gradient_of_keys
from ..score_mod import Given
from ..tile_scheduler import tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, SUMS_TYPE, keys_to_type
from .bias import BiasPlace, bias_dkv, chains_of
from .config import padded
from .dkv_config import CONSUMERS, DS_PLACES, FRAGMENT, FRAGMENT_BYTES, FusedConfig
from .dq_sums import draw, from_the_first, from_the_last, ordered_sums, place_of_sum, store_queue
from .loads import load_once
from .output import results_of_keys
from .products import Factor, Registers, probs_at_once, probs_by_steps, register_a


@builds
def build_fused(config: FusedConfig, variant: Variant, dk_stored: str, dv_stored: str) -> Kernel:
    """flash_attention_fused_sm90(maps, bias_maps, sums, to, x, work): `Maps`, one map of a bias as boxes or none,
    `Sums`, `KeysTo`, `GradientInputs`, `TiledWork`. For varlen, `section` counts queries.

    dk_stored, dv_stored: how dk and dv get to memory (`output`).
    """
    D, Dv, BLOCK_Q, BLOCK_KV, num = padded(variant.D), padded(variant.Dv), config.block_q, config.block_kv, numbers(f32)
    role = roles(CONSUMERS, most=config.most)
    chain, tile_chain = chains_of(variant, words=config.bias_in_boxes, gradient=True)
    warps, tiles = 4 * CONSUMERS, config.tiles(D, Dv)
    k_tile, v_tile = box_tile(tiles.k, 0, 2), box_tile(tiles.v, tiles.v_at, 2)
    q_tile, do_tile = box_tile(tiles.q, tiles.q_at, 2), box_tile(tiles.do, tiles.do_at, 2)
    kv_once, q_pipe = load_once(tiles.k.nbytes + tiles.v.nbytes), pipeline(config.stages, tiles.q.nbytes, warps)
    bias = bias_dkv(variant, config.bias, tiles.bias_at, warps)
    do_part = second_barrier(config.stages, tiles.do.nbytes + bias.nbytes, writers=1)  # with lse and delta
    kq = register_a(variant.dtype, tiles.k, tiles.part_q, held=config.k_held)
    vdo = register_a(variant.dtype, tiles.v, tiles.part_do, held=config.v_held)
    pdo, dsq = register_mma(variant.dtype, tiles.do_steps), register_mma(variant.dtype, tiles.q_steps)
    dsk = warpgroup_mma(variant.dtype, tiles.ds, tiles.k_columns)
    VARLEN = variant.varlen
    score = fragment_scores(tile_chain, ROWS, ROWS, bent=chain.bends, transposed=True, word=bias.word, others=VARLEN)
    columns = lse_delta_of(config.block_q, config.stages, chain)
    gradient = gradient_of_keys(tile_chain, score, variant.dtype, ROWS)
    stepwise = probs_by_steps(gradient, variant.dtype, tiles.do_steps)
    probs = stepwise if config.by_steps else probs_at_once(gradient, pdo)
    task_of = walk_by_keys(BLOCK_KV, BLOCK_Q, VARLEN, chain, last_first=config.ascends, packed=VARLEN)
    order = from_the_first(BLOCK_KV, BLOCK_Q, chain) if config.ascends else from_the_last(BLOCK_KV, BLOCK_Q)
    put_scores = put_matrices(variant.dtype, ROWS, anew=chain.scores or chain.weighs)
    both = warpgroup_barrier(CONSUMERS)
    PARTS, LAST = config.parts, config.parts - 1
    Q_BYTES = tiles.part_q.nbytes  # from one part to the next
    DO_BYTES = tiles.part_do.nbytes
    STATISTICS = 2 * ROWS // 8
    DS_AT, DS_BYTES = tiles.ds_at, tiles.ds.nbytes
    box, ordered = store_queue(config.dq_places, warps), ordered_sums(CONSUMERS * FRAGMENT_BYTES)
    place_of = place_of_sum(BLOCK_Q, VARLEN)
    DQ_AT, PLACE, SIZE = tiles.dq_at // 4, CONSUMERS * FRAGMENT, dsk.size
    # for dq, the warpgroups have different queries, or different columns
    MY_QUERIES, MY_COLUMNS = (DS_BYTES, 0) if config.parts > 1 else (0, tiles.k_columns.nbytes)
    results = results_of_keys(variant, chain, (dsq.size, pdo.size), (0, tiles.v_at), (dk_stored, dv_stored), CONSUMERS)
    to_type, x_type = keys_to_type(variant, dk_stored, dv_stored), gradient_inputs_type(variant)

    @verb
    def put_part(floats, bars, i, values):
        """Put my part of dq in a place, in the layout of registers: four numbers of a thread next to those of its
        neighbour.
        """
        tid = u32(cuda.threadIdx.x)
        mine = i32(tid // u32(128) * u32(FRAGMENT) + u32(4) * (tid % u32(128)))
        place = i32(box.claim(bars, i) * PLACE + mine)
        for n in range(0, SIZE, 4):
            num.store_vector(floats, i32(DQ_AT + place + 128 * n), values, n)
        box.hand(bars, i)

    @kernel(MAPS_TYPE, bias.maps_type, SUMS_TYPE, to_type, x_type, tiled_work_type(variant), threads=role.threads)
    def flash_attention_fused_sm90(maps, bias_maps, sums, to, x, work):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        kv_full, q_bars, do_full = kv_once.barrier(), q_pipe.barriers(), do_part.barriers()
        dq_bars, drawn = box.barriers(), cuda.shared.array(1, i32)
        slots = columns.slots()
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            drawn[0] = draw(sums.flags)
            kv_once.init(kv_full)
            q_pipe.init(q_bars)
            do_part.init(do_full)
            box.init(dq_bars)
            let_next_grid_begin()
        prefetch_maps(maps, 1)
        bias.prefetch(bias_maps)
        q_pipe.start()
        scale, options = work.scale, work.options
        group = work.extent.group
        task = task_of(drawn[0], work)
        if task.n0 >= task.Sk:
            return
        i, end = u32(0), u32(u32(group) * (u32(task.end - task.first + (BLOCK_Q - 1)) // u32(BLOCK_Q)))
        start = order.start(task)
        h, m0 = i32(task.h_kv * group), start
        if warpgroup == CONSUMERS:
            role.produce()
            tid, b = u32(cuda.threadIdx.x) % u32(128), i32(0) if VARLEN else task.b
            if tid == u32(0) and end != u32(0):
                token = i32(task.k_first + task.n0)
                kv_once.expect(kv_full)
                k_tile.load(smem, 0, maps.k, Corner(token, 0, (task.h_kv, b)), kv_full)
                v_tile.load(smem, 0, maps.v, Corner(token, 0, (task.h_kv, b)), kv_full)
                while i != end:
                    token, stage = i32(task.q_first + m0), q_pipe.acquire(q_bars, i)
                    q_tile.load(smem, stage, maps.q, Corner(token, 0, (h, b)), q_bars.full)
                    do_part.expect(do_full, i)
                    do_tile.load(smem, stage, maps.do, Corner(token, 0, (h, b)), do_full)
                    bias.bring(smem, stage, bias_maps, options, BiasPlace(task.b, h, m0, task.n0), do_full)
                    h, m0 = order.next(task, h, m0, start)
                    i = q_pipe.next(i)
            elif tid // u32(32) == u32(1):
                own = columns.own()
                while i != end:
                    columns.fetch(own, x, task, h, m0)
                    columns.put(slots, q_pipe.claim(q_bars, i), own)
                    do_part.hand(do_full, i)
                    h, m0 = order.next(task, h, m0, start)
                    i = q_pipe.next(i)
            elif tid == u32(64):
                while i != end:
                    tile = i32(place_of(task, work.extent.H, h, i32(u32(m0) // u32(BLOCK_Q)), sums.tiles))
                    at = i32(DQ_AT + box.take(dq_bars, i) * PLACE)
                    rank = order.rank(task, m0, options)
                    ordered.add(sums.data, i64(tile) * PLACE, floats, at, sums.flags, i64(tile) + 1, rank)
                    box.free(dq_bars, i)
                    h, m0 = order.next(task, h, m0, start)
                    i = q_pipe.next(i)
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            n = i32(task.n0 + ROWS * warpgroup)
            dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
            scores, d_probs, packed, packed_ds = kq.fragment(), vdo.fragment(), probs.left(), dsq.left()
            k_words, v_words = kq.words(), vdo.words()
            factors, words, seed = (scale, score.units(scale)[0]), bias.words(), score.seed(options)
            if end != u32(0):
                kv_once.wait(kv_full)
                k_at, v_at, adds = k_tile.at(0), v_tile.at(0), i32(0)
                kq.take(k_words, smem, k_at, warpgroup)
                vdo.take(v_words, smem, v_at, warpgroup)
                while i != end:
                    stage = q_pipe.wait(q_bars, i)
                    ds_at = i32(DS_AT + i32(u32(i) % u32(DS_PLACES)) * (LAST + 1) * DS_BYTES)
                    q_at, do_at = q_tile.at(stage), do_tile.at(stage)
                    for part in range(PARTS):
                        where = where_of(task, h, i32(m0 + ROWS * part), n)
                        at = i32(STATISTICS * part)
                        # S.T = K @ Q.T
                        kq.start(scores, k_words, smem, k_at, i32(q_at + Q_BYTES * part), warpgroup)
                        if part == 0:
                            do_part.wait(do_full, i)
                        # dP.T = V @ dO.T
                        vdo.start(d_probs, v_words, smem, v_at, i32(do_at + DO_BYTES * part), warpgroup)
                        kept, seen = score.keeps(options, where, seed), score.sees(score.ask(options, where))
                        kq.wait_but_one(scores)
                        held = bias.held(smem, stage, words)
                        score.finish_held(scores, held, options, scale, where, seen)
                        given, lse_at = Given(options, factors, where, held), i32(columns.lse(stage) + at)
                        # dv [64, Dv] += P.T @ dO
                        factor = Factor(smem, i32(do_at + DO_BYTES * part), adds)
                        probs.add(Registers(dv_acc, packed, scores), factor, given, kept, (slots, lse_at))
                        vdo.wait_but(d_probs, probs.groups)
                        gradient.d_scores(d_probs, scores, options, kept, (slots, i32(columns.delta(stage) + at)))
                        gradient.forget_others(d_probs, where)
                        gradient.pack(packed_ds, d_probs)
                        put_scores(smem, i32(ds_at + DS_BYTES * part + warpgroup * (DS_BYTES // CONSUMERS)), d_probs)
                        if part < LAST:
                            dsq.add(dk_acc, packed_ds, smem, i32(q_at + Q_BYTES * part), adds)  # dk += dS.T @ Q
                            adds = i32(1)
                    both.meet()
                    mine = i32(ds_at + warpgroup * MY_QUERIES), i32(k_at + warpgroup * MY_COLUMNS)
                    dsk.start(d_probs, smem, mine[0], mine[1], 0)  # dq [64, 64] = dS @ K
                    dsq.add(dk_acc, packed_ds, smem, i32(q_at + Q_BYTES * LAST), adds)  # dk [64, D] += dS.T @ Q
                    adds = i32(1)
                    h, m0 = order.next(task, h, m0, start)
                    dsk.wait_but_one(d_probs)
                    put_part(floats, dq_bars, i, d_probs)
                    dsq.wait(dk_acc)
                    do_part.leave()
                    q_pipe.release(q_bars, i)
                    i = q_pipe.next(i)
                pdo.wait(dv_acc)
                both.gather()  # dk goes where K was
            else:
                results.clear(dk_acc, dv_acc)
            task = task_of(opaque_i32(drawn[0]), work)  # recomputed: no register kept it
            results.store(smem, to, (dk_acc, dv_acc), task, i32(ROWS * warpgroup), x, work)

    return flash_attention_fused_sm90
