"""dq of attention without tensor cores. Dao 2023, arXiv:2307.08691, Alg. 2, as `simt_dkv` turned round.

A block of 16 x 16 threads takes BLOCK_Q queries of one head; rows are queries, columns keys.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      S [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T, through the options; P = exp(S - lse)
    3      dP = weight * dO @ V.T;   dS = P * (dP - delta) * slope
    4      dq [BLOCK_Q, D] += dS @ K
    5  dq *= scale
"""

from __future__ import annotations

from ..arrays import align_up
from ..backend import Kernel, builds, cuda, i64, kernel
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..views import start
from .arguments import Variant, array_type, size_types, spans, statistic_type
from .options import chain_of
from .simt_dkv import BackwardConfig
from .tiles import LANES, THREADS, Where, columns_of, row_of, score_tiles, tiles


@builds
def build_dq(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dq(dq, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options)."""
    mem = storage(variant.dtype)
    num = numbers(mem.number)
    chain, span = chain_of(variant.having, variant.dtype, gradient=True), spans(variant.varlen)

    TILE_Q, TILE_KV, BLOCK_Q, BLOCK_KV = config.tile_rows, config.tile_columns, config.rows, config.columns
    tile = tiles(variant.dtype, TILE_Q, TILE_KV)
    DS_ROW = row_of(BLOCK_KV)
    score_tile = score_tiles(chain, variant.dtype, TILE_Q, TILE_KV, DS_ROW, transposed=False)
    BENDS, WEIGHS, SHARE = chain.bends, chain.weighs, config.share
    D, Dv, D4, DV4 = variant.D, variant.Dv, align_up(variant.D, 4), align_up(variant.Dv, 4)
    GROUPS = columns_of(D) // 4
    Q_ROW, DO_ROW, K_ROW, V_ROW = row_of(D), row_of(Dv), row_of(align_up(D, 64)), row_of(align_up(Dv, 64))
    Q, DO, K, V, DS = config.places(D, Dv)
    N_SCORES, N_FRAGS, N_SLOPES = TILE_Q * TILE_KV, max(4 * TILE_KV, 16), TILE_Q * TILE_KV if BENDS else 1
    N_DQ = TILE_Q * columns_of(D)

    @kernel(
        *[array_type(variant)] * 5,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dq(dq, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        q_blocks = (Sq + BLOCK_Q - 1) // BLOCK_Q
        head = cuda.blockIdx.x // q_blocks
        m0 = (q_blocks - 1 - cuda.blockIdx.x % q_blocks) * BLOCK_Q
        b, h = i64(head // H), i64(head % H)
        h_kv = h // group
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, Sq, Sk)
        if m0 >= Sq:
            return
        offset = aligned * (Sk - Sq)
        q_start, do_start = start(q, b, h, q_first + m0), start(do, b, h, q_first + m0)
        if not SHARE:
            tile.load(smem, Q, Q_ROW, BLOCK_Q, D, q.data, q_start, q.strides[2], Sq - m0)
            tile.load(smem, DO, DO_ROW, BLOCK_Q, Dv, do.data, do_start, do.strides[2], Sq - m0)

        m = m0 + line * TILE_Q  # my first query
        lse_rows = cuda.local.array(TILE_Q, mem.number)
        delta_rows = cuda.local.array(TILE_Q, mem.number)
        for i in range(TILE_Q):
            lse_rows[i] = num.zero
            delta_rows[i] = num.zero
            if m + i < Sq:
                lse_rows[i] = num.base(lse.data[start(lse, b, h, q_first + m + i)])
                delta_rows[i] = delta.data[start(delta, b, h, q_first + m + i)]
        dq_acc = cuda.local.array(N_DQ, mem.number)
        for i in range(N_DQ):
            dq_acc[i] = num.zero
        scores = cuda.local.array(N_SCORES, mem.number)
        d_probs = cuda.local.array(N_SCORES, mem.number)
        slopes = cuda.local.array(N_SLOPES, mem.number)
        frag = cuda.local.array(4, mem.number)
        frags = cuda.local.array(N_FRAGS, mem.number)

        n_first, n_end = chain.key_range(options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
        for n0 in range(max(i64(n_first), 0) // BLOCK_KV * BLOCK_KV, n_end, BLOCK_KV):
            k_start, v_start = start(k, b, h_kv, k_first + n0), start(v, b, h_kv, k_first + n0)
            cuda.syncthreads()
            if SHARE:
                tile.load(smem, Q, Q_ROW, BLOCK_Q, D, q.data, q_start, q.strides[2], Sq - m0)
            strange = tile.load(smem, K, K_ROW, BLOCK_KV, D, k.data, k_start, k.strides[2], Sk - n0)
            if not SHARE:
                tile.load(smem, V, V_ROW, BLOCK_KV, Dv, v.data, v_start, v.strides[2], Sk - n0)
            cuda.syncthreads()

            tile.abt(scores, frag, frags, smem, Q, Q_ROW, K, K_ROW, D4, line, lane)
            where = Where(b, h, m, n0 + lane, Sq, Sk, offset)
            whole = (m0 + BLOCK_Q <= Sq) & (n0 + BLOCK_KV <= Sk)
            whole &= chain.full(options, m0, m0 + BLOCK_Q, n0, n0 + BLOCK_KV, offset)
            if BENDS:
                score_tile.slopes(slopes, scores, smem, DS, options, scale, where)
            score_tile.finish(scores, smem, DS, options, whole, scale, where)

            if SHARE:
                cuda.syncthreads()
                tile.load(smem, DO, DO_ROW, BLOCK_Q, Dv, do.data, do_start, do.strides[2], Sq - m0)
                tile.load(smem, V, V_ROW, BLOCK_KV, Dv, v.data, v_start, v.strides[2], Sk - n0)
                cuda.syncthreads()
            tile.abt(d_probs, frag, frags, smem, DO, DO_ROW, V, V_ROW, DV4, line, lane)
            if WEIGHS:
                score_tile.weights(smem, DS, options, where)
            for i in range(TILE_Q):
                for j in range(TILE_KV):
                    e = i * TILE_KV + j
                    my_place = tile.mine(DS, DS_ROW, e)
                    d_prob = d_probs[e]
                    if WEIGHS:
                        d_prob *= smem[my_place]
                    d_score = num.exp(scores[e] - lse_rows[i]) * (d_prob - delta_rows[i])
                    if BENDS:
                        d_score = d_score * slopes[e] + num.zero  # a slope of 0 gives no -0
                    smem[my_place] = d_score if scores[e] != num.minus_inf else num.minus_zero

            if SHARE:
                cuda.syncthreads()
                tile.load(smem, K, K_ROW, BLOCK_KV, D, k.data, k_start, k.strides[2], Sk - n0)
            if cuda.syncthreads_or(strange):
                tile.ab_counted(dq_acc, frag, frags, smem, DS, DS_ROW, K, K_ROW, BLOCK_KV, GROUPS, line, lane)
            else:
                tile.ab(dq_acc, frag, frags, smem, DS, DS_ROW, K, K_ROW, BLOCK_KV, GROUPS, line, lane)

        for i in range(TILE_Q):
            if m + i < Sq:
                row = start(dq, b, h, q_first + m + i)
                for g in range(GROUPS):
                    for c in range(4):
                        column = g * 64 + 4 * lane + c
                        if column < D:
                            mem.store(dq.data, row + column, dq_acc[(i * GROUPS + g) * 4 + c] * scale)

    return flash_attention_dq
