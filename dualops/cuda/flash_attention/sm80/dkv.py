"""dk and dv of attention by mma.sync, on Ampere and later. Dao 2023 (arXiv:2307.08691), Alg. 2, without its atomics.

A block has BLOCK_KV keys of one key head, a warp 16 of them, and takes all queries that see them, one tile of BLOCK_Q
queries after another, so that every sum has one owner and one order. Rows are keys, columns queries. One stage of
shared memory is multiplied while the others are filled (cp.async).

    1  start the copies of K, V and the first tile of queries that see some of the keys
    2  for each query head of the group, for each tile of queries that see some of the keys:
    3      start the copies of Q and dO of the next tile; a warp fetches their lse and delta
    4      S.T [16, BLOCK_Q] = K @ Q.T, through the options; P.T = exp2(S.T - lse), 0 if masked
    5      dv [16, Dv] += (weight * P.T) @ dO
    6      dP.T [16, BLOCK_Q] = V @ dO.T
    7      dS.T = P.T * (weight * dP.T - delta) * slope
    8      dk [16, D] += dS.T @ Q
    9      lse and delta of the next tile to shared memory; wait for its Q and dO, all threads
   10  dk *= scale; dk and dv, 16 rows of a warp at a time through shared memory

P.T and dS.T never leave registers: packed in pairs, accumulators are the left factors of 5 and 8, which read dO and Q
along their other axis.

A tile that sees no key is not loaded, and masks are applied only in tiles that they cut. A P.T of 0 times a NaN in Q or
dO is a NaN even if a mask hides it: rows that are not finite are recomputed (`nan_repair`).

Shared memory: `Sm80DkvConfig.tiles`, 2 * (BLOCK_KV + 2 * BLOCK_Q) * (D + Dv) bytes. Registers: BLOCK_Q / 2 of S.T and
of dP.T, a quarter of BLOCK_Q packed, D / 2 + Dv / 2 of dk and dv, D / 4 and Dv / 4 of K and V where they are held, and
about 40.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u32
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.products import opaque_i32
from ...tile.storage import storage
from ...tile.strips import strip_ab, strip_abt
from ..arguments import Variant, array_type, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..nan_repair import nan_repair_keys
from ..options import chain_of
from ..saved_lse import lse_delta_of
from ..score_gradients import gradient_of_keys
from ..score_mod import Given
from ..tile_scheduler import key_rows_of, tile_after, tiled_work_type, walk_by_keys
from ..tiles import lines, where_of
from .config import ROWS, Sm80DkvConfig
from .rows import GradientVectors, copies_of, output_of


@builds
def build_dkv(
    config: Sm80DkvConfig, variant: Variant, vectors: GradientVectors, dk_aligned: bool, dv_aligned: bool
) -> Kernel:
    """flash_attention_dkv_sm80(dk, dv, x, work). x: `GradientInputs`. work: `TiledWork`.

    vectors: elements of a copy. dk_aligned, dv_aligned: they are stored 16 bytes at a time.
    """
    mem, dtype, BLOCK_Q = storage(variant.dtype), variant.dtype, config.block_q
    chain, tile = chain_of(variant.having, dtype, gradient=True), config.tiles(variant.D, variant.Dv)
    task_of = walk_by_keys(config, variant)
    copy = copies_of(variant, tile, vectors, config.threads)
    kq = strip_abt(dtype, tile.k, tile.q, tile.k_boxes, held=config.k_held)
    vdo = strip_abt(dtype, tile.v, tile.do, tile.v_boxes, held=config.v_held)
    pdo, dsq = strip_ab(dtype, tile.do_steps, tile.v_boxes), strip_ab(dtype, tile.q_steps, tile.k_boxes)
    score = fragment_scores(chain, ROWS, BLOCK_Q, apart=False, bent=chain.bends, transposed=True)
    columns = lse_delta_of(config.block_q, config.stages, chain)
    gradient = gradient_of_keys(chain, score, dtype, BLOCK_Q)
    hidden = nan_repair_keys(chain, variant, dsq.size, pdo.size)
    widest = max(variant.D, variant.Dv)
    dk_output = output_of(dtype, variant.D, tile.k_boxes, dk_aligned, widest)
    dv_output = output_of(dtype, variant.Dv, tile.v_boxes, dv_aligned, widest)

    @kernel(
        *[array_type(variant)] * 2,
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dkv_sm80(dk, dv, x, work):
        smem, slots = cuda.shared.array(0, mem.element, alignment=128), columns.slots()
        task = task_of(cuda.blockIdx.x, work)
        if task.n0 >= task.Sk:
            return
        b, h_kv, n0 = task.b, task.h_kv, task.n0
        row, my_rows = i32(cuda.threadIdx.x // 128 * ROWS), i32(cuda.threadIdx.x // 32 * 16)
        brings = cuda.threadIdx.x < 32
        i, end = u32(0), u32(u32(work.extent.group) * (u32(task.end - task.first + (BLOCK_Q - 1)) // u32(BLOCK_Q)))
        h, m0 = i32(h_kv * work.extent.group), i32(task.first)
        own = columns.own()
        copy.k.load(smem, 0, lines(x.k, b, h_kv, task.k_first + n0, task.Sk - n0))
        copy.v.load(smem, tile.v_at, lines(x.v, b, h_kv, task.k_first + n0, task.Sk - n0))
        if end != u32(0):
            copy.q.load(smem, tile.q_at, lines(x.q, b, h, task.q_first + m0, task.Sq - m0))
            copy.do.load(smem, tile.do_at, lines(x.do, b, h, task.q_first + m0, task.Sq - m0))
            if brings:
                columns.fetch(own, x, task, h, m0)
                columns.put(slots, i32(0), own)
        cp_async_commit()

        scores, d_probs, packed = kq.fragment(), vdo.fragment(), pdo.left()
        factors, seed = (work.scale, score.units(work.scale)[0]), score.seed(work.options)
        dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
        cp_async_wait_group(0)
        cuda.syncthreads()
        k_place, v_place = kq.place(my_rows, 0), vdo.place(my_rows, tile.v_at)
        k_frag, v_frag = kq.hold(smem, k_place), vdo.hold(smem, v_place)
        while i != end:
            stage, coming = i32(i % u32(2)), i32((i + u32(1)) % u32(2))
            where = where_of(task, h, m0, i32(n0 + row))
            h, m0 = tile_after(task, h, m0, BLOCK_Q)
            if i + u32(1) != end:
                q_next, do_next = i32(tile.q_at + coming * tile.q_size), i32(tile.do_at + coming * tile.do_size)
                copy.q.load(smem, q_next, lines(x.q, b, h, task.q_first + m0, task.Sq - m0))
                copy.do.load(smem, do_next, lines(x.do, b, h, task.q_first + m0, task.Sq - m0))
                cp_async_commit()
            q_at, do_at = i32(tile.q_at + stage * tile.q_size), i32(tile.do_at + stage * tile.do_size)
            # opaque: otherwise the addresses of all steps would stay in registers, and none are left
            kq.multiply(scores, k_frag, smem, opaque_i32(k_place), q_at)  # S.T = K @ Q.T
            kept = score.keeps(work.options, where, seed)
            score.finish(scores, work.options, work.scale, where)
            given = Given(work.options, factors, where, 0)
            gradient.probabilities(packed, scores, given, kept, (slots, columns.lse(stage)))
            pdo.add(dv_acc, packed, smem, do_at)  # dv [16, Dv] += P.T @ dO
            vdo.multiply(d_probs, v_frag, smem, opaque_i32(v_place), do_at)  # dP.T = V @ dO.T
            gradient.d_scores(d_probs, scores, work.options, kept, (slots, columns.delta(stage)))
            gradient.pack(packed, d_probs)
            if brings and i + u32(1) != end:
                columns.fetch(own, x, task, h, m0)
            dsq.add(dk_acc, packed, smem, q_at)  # dk [16, D] += dS.T @ Q
            if brings and i + u32(1) != end:
                columns.put(slots, coming, own)
            cp_async_wait_group(0)
            cuda.syncthreads()
            i = u32(i + u32(1))

        hidden.repair(dk_acc, dv_acc, x, task, row, work)
        for e in range(dsq.size):
            dk_acc[e] *= work.scale
        rows, row_smem = key_rows_of(task), cuda.shared.array(0, f32, alignment=128)
        dk_output.store(row_smem, dk, dk_acc, rows, row)
        dv_output.store(row_smem, dv, dv_acc, rows, row)

    return flash_attention_dkv_sm80
