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

Varlen: rows behind the last key are the next sequence's keys. They get dS = 0, since dq sums over them. Tiles are
packed (`tile_scheduler`), and so are dq's sums. So there are as many blocks and sums as tokens need, and a sequence has
the bits that it has alone.

Shared memory: `FusedConfig.tiles`, 2 * 128 * (D + Dv) + stages * 2 * BLOCK_Q * (D + Dv) + 512 * BLOCK_Q + dq_places *
32768 bytes, and stages * 256 * BLOCK_Q for a bias. Registers: 64 of S.T and dP.T (dq takes their place), half of that
for P.T and dS.T packed, D / 2 + Dv / 2 of dk and dv, D / 4 of a held K, Dv / 4 of a held V, and about 16.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, Members, Noun, builds, cuda, f32, i32, i64, kernel, members, noun, u8, u32, verb
from ...tile.epilogue import put_matrices
from ...tile.grids import let_next_grid_begin
from ...tile.numbers import numbers
from ...tile.products import opaque_i32
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, register_mma, warpgroup_mma
from ...tile.warpgroup_barrier import warpgroup_barrier
from ..arguments import Variant, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..saved_lse import lse_delta_of
from ..score_gradients import gradient_of_keys
from ..tile_scheduler import tiled_work_type, walk_by_keys
from ..tiles import where_of
from .arguments import MAPS_TYPE, SUMS_TYPE, keys_to_type
from .bias import bias_dkv, chains_of
from .config import padded
from .dkv_config import CONSUMERS, DS_PLACES, FRAGMENT, FRAGMENT_BYTES, FusedConfig
from .dq_sums import draw, from_the_first, from_the_last, ordered_sums, place_of_sum, q_tiles_in_order, store_queue
from .loads import q_loads
from .output import results_of_keys
from .products import Factor, Registers, probs_at_once, probs_by_steps, register_a
from .tile_scores import scores_of_keys


@noun
def dq_outbox(config: FusedConfig, dq_at: int, size: int, order: Noun, varlen: bool) -> Members:
    """The verbs of dq on its way from `size` numbers of a thread to memory. dq_at: byte of shared memory."""
    num, PLACE, DQ_AT, BLOCK_Q = numbers(f32), CONSUMERS * FRAGMENT, dq_at // 4, config.block_q
    box = store_queue(config.dq_places, 4 * CONSUMERS)
    ordered, place_of = ordered_sums(CONSUMERS * FRAGMENT_BYTES), place_of_sum(BLOCK_Q, varlen)

    @verb
    def put(floats, bars, filling, values):
        """Put my part in a place, in the layout of registers: four numbers of a thread next to those of its
        neighbour.
        """
        tid = u32(cuda.threadIdx.x)
        mine = i32(tid // u32(128) * u32(FRAGMENT) + u32(4) * (tid % u32(128)))
        place = i32(box.claim(bars, filling) * PLACE + mine)
        for n in range(0, size, 4):
            num.store_vector(floats, i32(DQ_AT + place + 128 * n), values, n)
        box.hand(bars, filling)

    @verb
    def add(floats, bars, filling, sums, tile, task, work):
        """Add both warpgroups' parts to the sum of a tile in memory; by one thread."""
        number = i32(place_of(task, work.extent.H, tile.h, i32(u32(tile.m0) // u32(BLOCK_Q)), sums.tiles))
        at = i32(DQ_AT + box.take(bars, filling) * PLACE)
        rank = order.rank(task, tile.m0, work.options)
        ordered.add(sums.data, i64(number) * PLACE, floats, at, sums.flags, i64(number) + 1, rank)
        box.free(bars, filling)

    return members(locals(), barriers=box.barriers, init=box.init)


@builds
def build_fused(config: FusedConfig, variant: Variant, dk_stored: str, dv_stored: str) -> Kernel:
    """flash_attention_fused_sm90(maps, bias_maps, sums, to, x, work): `Maps`, one map of a bias as boxes or none,
    `Sums`, `KeysTo`, `GradientInputs`, `TiledWork`. For varlen, `section` counts queries.

    dk_stored, dv_stored: how dk and dv get to memory (`output`).
    """
    BLOCK_Q, BLOCK_KV, VARLEN, dtype = config.block_q, config.block_kv, variant.varlen, variant.dtype
    chain, tile_chain = chains_of(variant, words=config.bias_in_boxes, gradient=True)
    role, tiles = roles(CONSUMERS, most=config.most), config.tiles(padded(variant.D), padded(variant.Dv))
    bias = bias_dkv(variant, config.bias, tiles.bias_at, config.warps)
    kq = register_a(dtype, tiles.k, tiles.part_q, held=config.k_held)
    vdo = register_a(dtype, tiles.v, tiles.part_do, held=config.v_held)
    pdo, dsq = register_mma(dtype, tiles.do_steps), register_mma(dtype, tiles.q_steps)
    dsk = warpgroup_mma(dtype, tiles.ds, tiles.k_columns)
    order = from_the_first(BLOCK_KV, BLOCK_Q, chain) if config.ascends else from_the_last(BLOCK_KV, BLOCK_Q)
    visits, outbox = q_tiles_in_order(order, BLOCK_Q), dq_outbox(config, tiles.dq_at, dsk.size, order, VARLEN)
    load = q_loads(config, variant, visits, lse_delta_of(BLOCK_Q, config.stages, chain), bias, outbox)
    score = fragment_scores(tile_chain, ROWS, ROWS, bent=chain.bends, transposed=True, word=bias.word, others=VARLEN)
    scores_of = scores_of_keys(score, bias)
    gradient = gradient_of_keys(tile_chain, score, dtype, ROWS)
    stepwise = probs_by_steps(gradient, dtype, tiles.do_steps)
    probs = stepwise if config.by_steps else probs_at_once(gradient, pdo)
    task_of = walk_by_keys(BLOCK_KV, BLOCK_Q, VARLEN, chain, last_first=config.ascends, packed=VARLEN)
    put_scores = put_matrices(dtype, ROWS, anew=chain.scores or chain.weighs)
    both, PARTS, LAST, STATISTICS = warpgroup_barrier(CONSUMERS), config.parts, config.parts - 1, 2 * ROWS // 8
    Q_BYTES, DO_BYTES = tiles.part_q.nbytes, tiles.part_do.nbytes  # from one part to the next
    DS_AT, DS_BYTES = tiles.ds_at, tiles.ds.nbytes
    # for dq, the warpgroups have different queries, or different columns
    MY_QUERIES, MY_COLUMNS = (DS_BYTES, 0) if config.parts > 1 else (0, tiles.k_columns.nbytes)
    results = results_of_keys(variant, chain, (dsq.size, pdo.size), (0, tiles.v_at), (dk_stored, dv_stored), CONSUMERS)

    @kernel(
        MAPS_TYPE,
        bias.maps_type,
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
            let_next_grid_begin()
        bias.prefetch(bias_maps)
        load.start(bars, maps)
        task = task_of(drawn[0], work)
        if task.n0 >= task.Sk:
            return
        i, end, tile = u32(0), visits.count(task, work), visits.first(task, work)
        if warpgroup == CONSUMERS:
            role.produce()
            load.produce(smem, bars, maps, bias_maps, x, work, task)
            if u32(cuda.threadIdx.x) % u32(128) == u32(64):
                while i != end:
                    outbox.add(floats, bars.others, i, sums, tile, task, work)
                    tile = visits.after(tile, i, end, task, work)
                    i = load.q.next(i)
        else:
            role.consume()
            end = u32(shfl_idx_i32(i32(end), 0, FULL_WARP))
            row, own = i32(ROWS * warpgroup), scores_of.own(smem, work)
            dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
            scores, d_probs, packed, packed_ds = kq.fragment(), vdo.fragment(), probs.left(), dsq.left()
            k_words, v_words = kq.words(), vdo.words()
            if end != u32(0):
                (k_at, v_at), adds = load.wait_kv(bars), i32(0)
                kq.take(k_words, smem, k_at, warpgroup)
                vdo.take(v_words, smem, v_at, warpgroup)
                while i != end:
                    stage = load.q.wait(bars.q, i)
                    ds_at = i32(DS_AT + i32(u32(i) % u32(DS_PLACES)) * (LAST + 1) * DS_BYTES)
                    for part in range(PARTS):
                        q_at = i32(load.q_at(stage) + Q_BYTES * part)
                        do_at = i32(load.do_at(stage) + DO_BYTES * part)
                        kq.start(scores, k_words, smem, k_at, q_at, warpgroup)  # S.T = K @ Q.T
                        if part == 0:
                            load.do.wait(bars.do, i)
                        vdo.start(d_probs, v_words, smem, v_at, do_at, warpgroup)  # dP.T = V @ dO.T
                        where = where_of(task, tile.h, i32(tile.m0 + ROWS * part), i32(task.n0 + row))
                        known = scores_of.know(own, where, tile)
                        kq.wait_but_one(scores)
                        given = scores_of.mask(own, scores, known, stage)
                        (slots, lse_at), (_, delta_at) = load.lse(bars, stage), load.delta(bars, stage)
                        # dv [64, Dv] += P.T @ dO
                        mine, lse = Registers(dv_acc, packed, scores), (slots, i32(lse_at + STATISTICS * part))
                        probs.add(mine, Factor(smem, do_at, adds), given, known.kept, lse)
                        vdo.wait_but(d_probs, probs.groups)
                        delta = slots, i32(delta_at + STATISTICS * part)
                        gradient.d_scores(d_probs, scores, own.options, known.kept, delta)
                        gradient.forget_others(d_probs, where)
                        gradient.pack(packed_ds, d_probs)
                        put_scores(smem, i32(ds_at + DS_BYTES * part + warpgroup * (DS_BYTES // CONSUMERS)), d_probs)
                        if part < LAST:
                            dsq.add(dk_acc, packed_ds, smem, q_at, adds)  # dk += dS.T @ Q
                            adds = i32(1)
                    both.meet()
                    mine_at = i32(ds_at + warpgroup * MY_QUERIES), i32(k_at + warpgroup * MY_COLUMNS)
                    dsk.start(d_probs, smem, mine_at[0], mine_at[1], 0)  # dq [64, 64] = dS @ K
                    q_at = i32(load.q_at(stage) + Q_BYTES * LAST)
                    dsq.add(dk_acc, packed_ds, smem, q_at, adds)  # dk [64, D] += dS.T @ Q
                    adds, tile = i32(1), visits.after(tile, i, end, task, work)
                    dsk.wait_but_one(d_probs)
                    outbox.put(floats, bars.others, i, d_probs)
                    dsq.wait(dk_acc)
                    load.release(bars, i)
                    i = load.q.next(i)
                pdo.wait(dv_acc)
                both.gather()  # dk goes where K was
            else:
                results.clear(dk_acc, dv_acc)
            task = task_of(opaque_i32(drawn[0]), work)  # recomputed: no register kept it
            results.store(smem, to, (dk_acc, dv_acc), task, row, x, work)

    return flash_attention_fused_sm90
