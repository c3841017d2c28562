"""dq of attention without tensor cores. Dao 2023, arXiv:2307.08691, Alg. 2: `simt_dkv` with queries for keys.

A block of 16 x 16 threads has BLOCK_Q queries of one head; rows are queries, columns keys.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      S [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T, through the options; P = exp(S - lse)
    3      dP = weight * dO @ V.T;   dS = P * (dP - delta) * slope
    4      dq [BLOCK_Q, D] += dS @ K
    5  dq *= scale
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i64, kernel
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_ab, mma_abt
from ..tile.storage import storage
from .arguments import Variant, array_type, gradient_inputs_type, size_types, spans
from .options import chain_of
from .saved_lse import exponential_of
from .simt_dkv import BackwardConfig
from .tiles import Where, lines, score_tile


@builds
def build_dq(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dq(dq, x, work). x: `GradientInputs`."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    exponential = exponential_of(mem.number)
    chain, span = chain_of(variant.having, variant.dtype, gradient=True), spans(variant.varlen)
    tile = config.layout(variant.D, variant.Dv, variant.dtype, 1)
    qk = mma_abt(mem.number, tile.own, tile.passing, config.tile_rows, config.tile_columns)
    dov = mma_abt(mem.number, tile.own_v, tile.passing_v, config.tile_rows, config.tile_columns)
    dsk = mma_ab(mem.number, tile.d_scores, tile.passing, config.tile_rows)
    score = score_tile(chain, variant.dtype, qk, tile.d_scores, gradient=True)
    BLOCK_Q, BLOCK_KV = config.rows, config.columns

    @kernel(
        array_type(variant),
        gradient_inputs_type(variant),
        size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dq(dq, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        line = cuda.threadIdx.x // LANES
        q_blocks = (work.Sq + BLOCK_Q - 1) // BLOCK_Q
        head = cuda.blockIdx.x // q_blocks
        m0 = (q_blocks - 1 - cuda.blockIdx.x % q_blocks) * BLOCK_Q
        b, h = i64(head // work.H), i64(head % work.H)
        h_kv = h // work.group
        q_first, k_first, Sq, Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
        if m0 >= Sq:
            return
        offset = work.aligned * (Sk - Sq)
        q_lines, do_lines = lines(x.q, b, h, q_first + m0, Sq - m0), lines(x.do, b, h, q_first + m0, Sq - m0)
        if not config.share:
            tile.own.load(smem, q_lines)
            tile.own_v.load(smem, do_lines)

        m = m0 + line * qk.rows  # my first query
        lse_rows = cuda.local.array(qk.rows, mem.number)
        delta_rows = cuda.local.array(qk.rows, mem.number)
        for i in range(qk.rows):
            lse_rows[i] = num.zero
            delta_rows[i] = num.zero
            if m + i < Sq:
                lse_rows[i] = num.base(x.lse.data[start(x.lse, b, h, q_first + m + i)])
                delta_rows[i] = x.delta.data[start(x.delta, b, h, q_first + m + i)]
        dq_acc = dsk.fragment()
        dsk.clear(dq_acc)
        scores, d_probs, slopes = qk.fragment(), qk.fragment(), qk.fragment()

        n_first, n_end = chain.key_range(work.options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
        for n0 in range(n_first // BLOCK_KV * BLOCK_KV, n_end, BLOCK_KV):
            k_lines, v_lines = lines(x.k, b, h_kv, k_first + n0, Sk - n0), lines(x.v, b, h_kv, k_first + n0, Sk - n0)
            cuda.syncthreads()
            if config.share:
                tile.own.load(smem, q_lines)
            strange = tile.passing.load(smem, k_lines)
            if not config.share:
                tile.passing_v.load(smem, v_lines)
            cuda.syncthreads()

            qk.clear(scores)
            qk.add(scores, smem)  # scores [BLOCK_Q, BLOCK_KV] = Q @ K.T
            where = Where(b, h, m0, n0, Sq, Sk, offset)
            if chain.bends:
                score.slopes(slopes, scores, smem, work.options, work.scale, where)
            score.finish(scores, smem, work.options, work.scale, where)

            if config.share:
                cuda.syncthreads()
                tile.own_v.load(smem, do_lines)
                tile.passing_v.load(smem, v_lines)
                cuda.syncthreads()
            dov.clear(d_probs)
            dov.add(d_probs, smem)  # d_probs [BLOCK_Q, BLOCK_KV] = dO @ V.T
            if chain.weighs:
                score.weights(smem, work.options, where)
            for i in range(qk.rows):
                for j in range(qk.columns):
                    e = i * qk.columns + j
                    d_prob = d_probs[e]
                    if chain.weighs:
                        d_prob *= smem[score.at(e)]
                    d_score = exponential(scores[e], lse_rows[i]) * (d_prob - delta_rows[i])
                    if chain.bends:
                        d_score = d_score * slopes[e] + num.zero  # a slope of 0 gives no -0
                    smem[score.at(e)] = d_score if score.counts(scores[e], lse_rows[i]) else num.minus_zero

            if config.share:
                cuda.syncthreads()
                tile.passing.load(smem, k_lines)
            if cuda.syncthreads_or(strange):
                dsk.add_counted(dq_acc, smem, BLOCK_KV)
            else:
                dsk.add(dq_acc, smem)  # dq [BLOCK_Q, D] += dS @ K

        for i in range(qk.rows):
            if m + i < Sq:
                row = start(dq, b, h, q_first + m + i)
                for c in range(dsk.columns):
                    if dsk.column(c) < variant.D:
                        mem.store(dq.data, row + dsk.column(c), dq_acc[i * dsk.columns + c] * work.scale)

    return flash_attention_dq
