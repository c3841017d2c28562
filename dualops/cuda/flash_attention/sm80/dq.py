"""dq of attention by mma.sync, on Ampere and later. Dao 2023 (arXiv:2307.08691), Alg. 2, in the order of forward.

A block has BLOCK_Q queries of one head, a warp 16 of them. Two stages of shared memory hold BLOCK_KV keys and their
values each: one is filled (cp.async) while the other is multiplied.

    1  start the copies of Q, dO and the last tile of keys that some of the queries see
    2  a warp's rows of Q and dO to registers, or read again for each tile; lse and delta of a thread's two rows
    3  for each tile, the last first:
    4      start the copies of the tile before it, to the other stage
    5      scores [16, BLOCK_KV] = Q @ K.T, through the options; -inf if masked
    6      P = exp2(scores - lse) * slope
    7      dP [16, BLOCK_KV] = dO @ V.T
    8      dS = P * (weight * dP - delta)
    9      acc [16, D] += dS @ K
   10      wait for the next tile, all threads
   11  dq = acc * scale, 16 rows of a warp at a time through shared memory

K of a tile is read twice: by its rows for the scores, by its columns for dq. dS never leaves registers: packed in
pairs, accumulators are the left factor of 9.

A tile that no query sees is not loaded, and masks are applied only in tiles that they cut. What a mask hides has P = 0,
and 0 times a NaN in K or V is a NaN: a row that is not finite is recomputed (`nan_repair`). A row that sees no key has
lse = -inf, and gets zeros.

Shared memory: `Sm80DqConfig.tiles`, 2 * (BLOCK_Q + 2 * BLOCK_KV) * (D + Dv) bytes. Registers: BLOCK_KV / 2 scores, as
many of dP, and dS in half as many, D / 2 of acc, D / 4 + Dv / 4 of Q and dO where they are held, and about 40.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u32
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.products import opaque_i32
from ...tile.softmax_rows import softmax_rows
from ...tile.storage import storage
from ...tile.strips import strip_ab, strip_abt
from ..arguments import Variant, array_type, gradient_inputs_type
from ..fragment_scores import fragment_scores
from ..nan_repair import nan_repair
from ..options import chain_of
from ..score_gradients import gradient_of_queries
from ..tile_scheduler import ROWS_OF_A_HEAD, range_of, tiled_work_type, walk_by_queries
from ..tiles import lines, where_of
from .config import ROWS, Sm80DqConfig
from .rows import GradientVectors, copies_of, output_of


@builds
def build_dq(config: Sm80DqConfig, variant: Variant, vectors: GradientVectors, aligned: bool) -> Kernel:
    """flash_attention_dq_sm80(dq, x, work). x: `GradientInputs`. work: `TiledWork`.

    vectors: elements of a copy. aligned: dq is stored 16 bytes at a time.
    """
    mem, dtype, BLOCK_KV = storage(variant.dtype), variant.dtype, config.block_kv
    chain, tile = chain_of(variant.having, dtype, gradient=True), config.tiles(variant.D, variant.Dv)
    keys = range_of(BLOCK_KV)
    walk = walk_by_queries(config, variant, gradient=True)
    copy = copies_of(variant, tile, vectors, config.threads)
    qk = strip_abt(dtype, tile.q, tile.k, tile.q_boxes, held=config.held)
    dov = strip_abt(dtype, tile.do, tile.v, tile.v_boxes, held=config.held)
    dsk = strip_ab(dtype, tile.k_right, tile.q_boxes)
    rows = softmax_rows(dtype, qk.size, dsk.size)
    score = fragment_scores(chain, ROWS, BLOCK_KV, apart=False, bent=chain.scores)
    gradient = gradient_of_queries(chain, score, rows, qk.size, dsk.size)
    hidden = nan_repair(chain, variant, ROWS_OF_A_HEAD, keys.keys, dsk.size, passes=False, gradient=True)
    output = output_of(dtype, variant.D, tile.q_boxes, aligned)

    @kernel(
        array_type(variant),
        gradient_inputs_type(variant),
        tiled_work_type(variant),
        threads=config.threads,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dq_sm80(dq, x, work):
        smem = cuda.shared.array(0, mem.element, alignment=128)
        task = walk.task(i32(cuda.blockIdx.x), work)
        if task.m0 >= task.Sq:
            return
        b, h, h_kv, count = task.b, task.h, task.h_kv, task.count
        row, my_rows = i32(cuda.threadIdx.x // 128 * ROWS), i32(cuda.threadIdx.x // 32 * 16)
        n0 = i32((task.first + i32(count)) * BLOCK_KV - BLOCK_KV)
        copy.q.load(smem, 0, lines(x.q, b, h, task.q_first + task.m0, task.Sq - task.m0))
        copy.do.load(smem, tile.do_at, lines(x.do, b, h, task.q_first + task.m0, task.Sq - task.m0))
        if count != u32(0):
            copy.k.load(smem, tile.k_at, lines(x.k, b, h_kv, task.k_first + n0, task.Sk - n0))
            copy.v.load(smem, tile.v_at, lines(x.v, b, h_kv, task.k_first + n0, task.Sk - n0))
        cp_async_commit()

        scores, d_probs, acc, d_scores = qk.fragment(), dov.fragment(), dsk.fragment(), dsk.left()
        held = score.held()  # unused: products are not changed here
        row_lse, row_base, row_delta = gradient.pair(), gradient.pair(), gradient.pair()
        gradient.read(row_lse, x.lse, task, row)
        gradient.read(row_delta, x.delta, task, row)
        gradient.bases(row_base, row_lse)
        cp_async_wait_group(0)
        cuda.syncthreads()
        q_place, do_place = qk.place(my_rows, 0), dov.place(my_rows, tile.do_at)
        q_frag, do_frag = qk.hold(smem, q_place), dov.hold(smem, do_place)
        i = u32(0)
        while i != count:
            stage, n1 = i32(i % u32(2)), i32(n0 - BLOCK_KV)
            if i + u32(1) != count:
                k_next, v_next = i32(tile.k_at + (1 - stage) * tile.k_size), i32(tile.v_at + (1 - stage) * tile.v_size)
                copy.k.load(smem, k_next, lines(x.k, b, h_kv, task.k_first + n1, task.Sk - n1))
                copy.v.load(smem, v_next, lines(x.v, b, h_kv, task.k_first + n1, task.Sk - n1))
                cp_async_commit()
            k_at, v_at = i32(tile.k_at + stage * tile.k_size), i32(tile.v_at + stage * tile.v_size)
            where = where_of(task, h, i32(task.m0 + row), n0)
            qk.multiply(scores, q_frag, smem, q_place, k_at)  # scores = Q @ K.T
            score.finish(scores, work.options, work.scale, where)
            gradient.probs(scores, held, work.options, work.scale, where, row_base)
            dov.multiply(d_probs, do_frag, smem, do_place, v_at)  # dP = dO @ V.T
            gradient.d_scores(scores, d_probs, work.options, where, row_delta)
            dsk.put(d_scores, scores)
            dsk.add(acc, d_scores, smem, k_at)  # acc [16, D] += dS @ K
            cp_async_wait_group(0)
            cuda.syncthreads()
            i, n0 = u32(i + u32(1)), n1

        task = walk.task(opaque_i32(cuda.blockIdx.x), work)  # again: no register kept it
        gradient.read(row_lse, x.lse, task, row)
        hidden.repair(acc, (row_lse[0], row_lse[1]), x, task, row, i32(0), work)
        gradient.scale(acc, work.scale, row_lse)
        row_smem = cuda.shared.array(0, f32, alignment=128)
        output.store(row_smem, dq, acc, task, row)

    return flash_attention_dq_sm80
