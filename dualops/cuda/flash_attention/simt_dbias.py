"""dbias of attention without tensor cores: dS, summed over the axes that the bias is broadcast on.

A block of 16 x 16 threads takes a tile of the bias and makes dS of every tile of scores that was given it, one after
another, as `simt_dq` does: other batches and heads, and other queries or keys where the bias has only one. What is left
to sum when all have passed lies within the tile.

    1  for each batch, head, tile of queries and tile of keys that the tile of the bias was added to:
    2      dS [BLOCK_Q, BLOCK_KV] = P * (weight * dO @ V.T - delta)
    3      total += dS                                          compensated (Kahan): there may be thousands of terms
    4  dbias = total, summed over rows or columns that the bias has one of

Q and dO take turns in one place of shared memory, K and V in another.
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.views import start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_abt
from ..tile.storage import storage
from .arguments import Variant, array_type, size_types, statistic_type
from .options import chain_of
from .saved_lse import exponential_of
from .simt_dkv import BackwardConfig
from .tiles import Where, lines, score_tile


@builds
def build_dbias(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dbias(dbias, B_bias, H_bias, Sq_bias, Sk_bias, B, q, k, v, do, lse, delta, H, group, ...).

    dbias has strides along B, H, Sq, Sk; B_bias to Sk_bias are its sizes, 1 where it is broadcast.
    """
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    exponential = exponential_of(mem.number)
    chain = chain_of(variant.having, variant.dtype)
    tile = config.layout(variant.D, variant.Dv, variant.dtype, 1)
    qk = mma_abt(mem.number, tile.own, tile.passing, config.tile_rows, config.tile_columns)
    dov = mma_abt(mem.number, tile.own_v, tile.passing_v, config.tile_rows, config.tile_columns)
    score = score_tile(chain, variant.dtype, qk, tile.d_scores, gradient=True)
    BLOCK_Q, BLOCK_KV = config.rows, config.columns

    @kernel(
        strided(variant.dtype, 4),
        *[i32] * 5,
        *[array_type(variant)] * 4,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dbias(
        dbias, B_bias, H_bias, Sq_bias, Sk_bias, B, q, k, v, do, lse, delta,
        H, group, Sq, Sk, aligned, scale, lengths, options,
    ):  # fmt: skip
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        line = tid // LANES
        kv_blocks, q_blocks = (Sk_bias + BLOCK_KV - 1) // BLOCK_KV, (Sq_bias + BLOCK_Q - 1) // BLOCK_Q
        n_own = cuda.blockIdx.x % kv_blocks * BLOCK_KV
        m_own = cuda.blockIdx.x // kv_blocks % q_blocks * BLOCK_Q
        head = cuda.blockIdx.x // kv_blocks // q_blocks
        b_own, h_own = head // H_bias, head % H_bias
        offset = aligned * (Sk - Sq)
        # what the tile was added to
        b_end, h_end = b_own + 1 if B_bias > 1 else B, h_own + 1 if H_bias > 1 else H
        m_end, n_end = m_own + 1 if Sq_bias > 1 else Sq, n_own + 1 if Sk_bias > 1 else Sk

        totals, rests = qk.fragment(), qk.fragment()
        qk.clear(totals)
        qk.clear(rests)
        scores, d_probs = qk.fragment(), qk.fragment()

        for b in range(b_own, b_end):
            for h in range(h_own, h_end):
                h_kv = h // group
                for m0 in range(m_own, m_end, BLOCK_Q):
                    seen_first, seen_end = chain.key_range(options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
                    q_lines, do_lines = lines(q, b, h, m0, Sq - m0), lines(do, b, h, m0, Sq - m0)
                    for n0 in range(n_own, n_end, BLOCK_KV):
                        if (n0 + BLOCK_KV <= seen_first) | (n0 >= seen_end):
                            continue
                        k_lines, v_lines = lines(k, b, h_kv, n0, Sk - n0), lines(v, b, h_kv, n0, Sk - n0)
                        cuda.syncthreads()
                        tile.own.load(smem, q_lines)
                        tile.passing.load(smem, k_lines)
                        cuda.syncthreads()
                        qk.clear(scores)
                        qk.add(scores, smem)  # scores [BLOCK_Q, BLOCK_KV] = Q @ K.T
                        where = Where(i64(b), i64(h), m0, n0, Sq, Sk, offset)
                        score.finish(scores, smem, options, scale, where)
                        cuda.syncthreads()
                        tile.own_v.load(smem, do_lines)
                        tile.passing_v.load(smem, v_lines)
                        cuda.syncthreads()
                        dov.clear(d_probs)
                        dov.add(d_probs, smem)  # d_probs [BLOCK_Q, BLOCK_KV] = dO @ V.T
                        if chain.weighs:
                            score.weights(smem, options, where)
                        for i in range(qk.rows):
                            m = m0 + line * qk.rows + i
                            lse_row, delta_row = num.zero, num.zero
                            if m < Sq:
                                lse_row = num.base(lse.data[start(lse, b, h, m)])
                                delta_row = delta.data[start(delta, b, h, m)]
                            for j in range(qk.columns):
                                e = i * qk.columns + j
                                d_prob = d_probs[e]
                                if chain.weighs:
                                    d_prob *= smem[score.at(e)]
                                d_score = num.zero
                                if score.counts(scores[e], lse_row):
                                    d_score = exponential(scores[e], lse_row) * (d_prob - delta_row)
                                totals[e], rests[e] = num.add_compensated(totals[e], rests[e], d_score)

        for e in range(qk.size):
            smem[score.at(e)] = totals[e]
        cuda.syncthreads()
        one_row, one_column = Sq_bias == 1, Sk_bias == 1
        rows, columns = 1 if one_row else BLOCK_Q, 1 if one_column else BLOCK_KV
        for place in range(tid, rows * columns, THREADS):
            r, c = place // columns, place % columns
            if (m_own + r < Sq_bias) & (n_own + c < Sk_bias):
                total, rest = num.zero, num.zero
                for row in range(r, BLOCK_Q if one_row else r + 1):
                    for column in range(c, BLOCK_KV if one_column else c + 1):
                        total, rest = num.add_compensated(total, rest, smem[tile.d_scores.place(row, column)])
                strides = dbias.strides
                at = i64(b_own) * strides[0] + i64(h_own) * strides[1]
                mem.store(dbias.data, at + i64(m_own + r) * strides[2] + i64(n_own + c) * strides[3], total)

    return flash_attention_dbias
