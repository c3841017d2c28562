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

from ..arrays import align_up
from ..backend import Kernel, builds, cuda, i32, i64, kernel
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..views import start, strided
from .arguments import Variant, array_type, size_types, statistic_type
from .options import chain_of
from .simt_dkv import BackwardConfig
from .tiles import LANES, THREADS, Where, row_of, score_tiles, tiles


@builds
def build_dbias(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dbias(dbias, B_bias, H_bias, Sq_bias, Sk_bias, B, q, k, v, do, lse, delta, H, group, ...).

    dbias has strides along B, H, Sq, Sk; B_bias to Sk_bias are its sizes, 1 where it is broadcast.
    """
    mem = storage(variant.dtype)
    num, chain = numbers(mem.number), chain_of(variant.having, variant.dtype)

    TILE_Q, TILE_KV, BLOCK_Q, BLOCK_KV = config.tile_rows, config.tile_columns, config.rows, config.columns
    tile = tiles(variant.dtype, TILE_Q, TILE_KV)
    DS_ROW = row_of(BLOCK_KV)
    score_tile = score_tiles(chain, variant.dtype, TILE_Q, TILE_KV, DS_ROW, transposed=False)
    WEIGHS = chain.weighs
    D, Dv, D4, DV4 = variant.D, variant.Dv, align_up(variant.D, 4), align_up(variant.Dv, 4)
    Q_ROW, DO_ROW, K_ROW, V_ROW = row_of(D), row_of(Dv), row_of(align_up(D, 64)), row_of(align_up(Dv, 64))
    Q, DO, K, V, DS = config.places(D, Dv)
    N_SCORES, N_FRAGS = TILE_Q * TILE_KV, max(4 * TILE_KV, 16)

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
        lane, line = tid % LANES, tid // LANES
        kv_blocks, q_blocks = (Sk_bias + BLOCK_KV - 1) // BLOCK_KV, (Sq_bias + BLOCK_Q - 1) // BLOCK_Q
        n_own = cuda.blockIdx.x % kv_blocks * BLOCK_KV
        m_own = cuda.blockIdx.x // kv_blocks % q_blocks * BLOCK_Q
        head = cuda.blockIdx.x // kv_blocks // q_blocks
        b_own, h_own = head // H_bias, head % H_bias
        offset = aligned * (Sk - Sq)
        # what the tile was added to
        b_end, h_end = b_own + 1 if B_bias > 1 else B, h_own + 1 if H_bias > 1 else H
        m_end, n_end = m_own + 1 if Sq_bias > 1 else Sq, n_own + 1 if Sk_bias > 1 else Sk

        totals = cuda.local.array(N_SCORES, mem.number)
        rests = cuda.local.array(N_SCORES, mem.number)
        for e in range(N_SCORES):
            totals[e] = num.zero
            rests[e] = num.zero
        scores = cuda.local.array(N_SCORES, mem.number)
        d_probs = cuda.local.array(N_SCORES, mem.number)
        frag = cuda.local.array(4, mem.number)
        frags = cuda.local.array(N_FRAGS, mem.number)

        for b in range(b_own, b_end):
            for h in range(h_own, h_end):
                h_kv = h // group
                for m0 in range(m_own, m_end, BLOCK_Q):
                    seen_first, seen_end = chain.key_range(options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
                    q_start, do_start = start(q, b, h, m0), start(do, b, h, m0)
                    for n0 in range(n_own, n_end, BLOCK_KV):
                        if (n0 + BLOCK_KV <= seen_first) | (n0 >= seen_end):
                            continue
                        k_start, v_start = start(k, b, h_kv, n0), start(v, b, h_kv, n0)
                        cuda.syncthreads()
                        tile.load(smem, Q, Q_ROW, BLOCK_Q, D, q.data, q_start, q.strides[2], Sq - m0)
                        tile.load(smem, K, K_ROW, BLOCK_KV, D, k.data, k_start, k.strides[2], Sk - n0)
                        cuda.syncthreads()
                        tile.abt(scores, frag, frags, smem, Q, Q_ROW, K, K_ROW, D4, line, lane)
                        where = Where(i64(b), i64(h), m0 + line * TILE_Q, n0 + lane, Sq, Sk, offset)
                        whole = (m0 + BLOCK_Q <= Sq) & (n0 + BLOCK_KV <= Sk)
                        whole &= chain.full(options, m0, m0 + BLOCK_Q, n0, n0 + BLOCK_KV, offset)
                        score_tile.finish(scores, smem, DS, options, whole, scale, where)
                        cuda.syncthreads()
                        tile.load(smem, DO, DO_ROW, BLOCK_Q, Dv, do.data, do_start, do.strides[2], Sq - m0)
                        tile.load(smem, V, V_ROW, BLOCK_KV, Dv, v.data, v_start, v.strides[2], Sk - n0)
                        cuda.syncthreads()
                        tile.abt(d_probs, frag, frags, smem, DO, DO_ROW, V, V_ROW, DV4, line, lane)
                        if WEIGHS:
                            score_tile.weights(smem, DS, options, where)
                        for i in range(TILE_Q):
                            m = m0 + line * TILE_Q + i
                            lse_row, delta_row = num.zero, num.zero
                            if m < Sq:
                                lse_row = num.base(lse.data[start(lse, b, h, m)])
                                delta_row = delta.data[start(delta, b, h, m)]
                            for j in range(TILE_KV):
                                e = i * TILE_KV + j
                                d_prob = d_probs[e]
                                if WEIGHS:
                                    d_prob *= smem[tile.mine(DS, DS_ROW, e)]
                                d_score = num.zero
                                if scores[e] != num.minus_inf:
                                    d_score = num.exp(scores[e] - lse_row) * (d_prob - delta_row)
                                totals[e], rests[e] = num.add_compensated(totals[e], rests[e], d_score)

        for e in range(N_SCORES):
            smem[tile.mine(DS, DS_ROW, e)] = totals[e]
        cuda.syncthreads()
        one_row, one_column = Sq_bias == 1, Sk_bias == 1
        rows, columns = 1 if one_row else BLOCK_Q, 1 if one_column else BLOCK_KV
        for place in range(tid, rows * columns, THREADS):
            r, c = place // columns, place % columns
            if (m_own + r < Sq_bias) & (n_own + c < Sk_bias):
                total, rest = num.zero, num.zero
                for row in range(r, BLOCK_Q if one_row else r + 1):
                    for column in range(c, BLOCK_KV if one_column else c + 1):
                        total, rest = num.add_compensated(total, rest, smem[DS + row * DS_ROW + column])
                strides = dbias.strides
                at = i64(b_own) * strides[0] + i64(h_own) * strides[1]
                mem.store(dbias.data, at + i64(m_own + r) * strides[2] + i64(n_own + c) * strides[3], total)

    return flash_attention_dbias
