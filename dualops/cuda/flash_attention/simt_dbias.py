"""dbias of attention without tensor cores: dS, summed over the axes that the bias is broadcast on.

A block of 16 x 16 threads has a tile of the bias. It makes dS of every tile of scores that the bias tile was added to,
one after another, as `simt_dq` does: other batches and heads, and other queries or keys where the bias has only one.
The sums that remain then are within the tile.

    1  for each batch, head, tile of queries and tile of keys that the tile of the bias was added to:
    2      dS [BLOCK_Q, BLOCK_KV] = P * (weight * dO @ V.T - delta)
    3      total += dS                                          compensated (Kahan): there may be thousands of terms
    4  dbias = total, summed over rows or columns that the bias has one of

Q and dO take turns in one place of shared memory, K and V in another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, types
from ..launch.views import start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_abt
from ..tile.storage import storage
from .arguments import Variant, gradient_inputs_type, size_types
from .options import chain_of
from .saved_lse import exponential_of
from .simt_dkv import BackwardConfig
from .tiles import Where, lines, score_tile


class BiasSizes(NamedTuple):
    """Sizes of a bias, 1 along an axis that it is broadcast on."""

    B: Any
    H: Any
    Sq: Any
    Sk: Any


@builds
def build_dbias(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dbias(dbias, bias, B, x, work). dbias: with strides along B, H, Sq, Sk. x: `GradientInputs`."""
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
        types.NamedUniTuple(i32, 4, BiasSizes),
        i32,
        gradient_inputs_type(variant),
        size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dbias(dbias, bias, B, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        line = tid // LANES
        Sq, Sk = work.Sq, work.Sk
        kv_blocks, q_blocks = (bias.Sk + BLOCK_KV - 1) // BLOCK_KV, (bias.Sq + BLOCK_Q - 1) // BLOCK_Q
        n_own = cuda.blockIdx.x % kv_blocks * BLOCK_KV
        m_own = cuda.blockIdx.x // kv_blocks % q_blocks * BLOCK_Q
        head = cuda.blockIdx.x // kv_blocks // q_blocks
        b_own, h_own = head // bias.H, head % bias.H
        offset = work.aligned * (Sk - Sq)
        # what the tile was added to
        b_end, h_end = b_own + 1 if bias.B > 1 else B, h_own + 1 if bias.H > 1 else work.H
        m_end, n_end = m_own + 1 if bias.Sq > 1 else Sq, n_own + 1 if bias.Sk > 1 else Sk

        totals, rests = qk.fragment(), qk.fragment()
        qk.clear(totals)
        qk.clear(rests)
        scores, d_probs = qk.fragment(), qk.fragment()

        for b in range(b_own, b_end):
            for h in range(h_own, h_end):
                h_kv = h // work.group
                for m0 in range(m_own, m_end, BLOCK_Q):
                    seen_first, seen_end = chain.key_range(work.options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
                    q_lines, do_lines = lines(x.q, b, h, m0, Sq - m0), lines(x.do, b, h, m0, Sq - m0)
                    for n0 in range(n_own, n_end, BLOCK_KV):
                        if (n0 + BLOCK_KV <= seen_first) | (n0 >= seen_end):
                            continue
                        k_lines, v_lines = lines(x.k, b, h_kv, n0, Sk - n0), lines(x.v, b, h_kv, n0, Sk - n0)
                        cuda.syncthreads()
                        tile.own.load(smem, q_lines)
                        tile.passing.load(smem, k_lines)
                        cuda.syncthreads()
                        qk.clear(scores)
                        qk.add(scores, smem)  # scores [BLOCK_Q, BLOCK_KV] = Q @ K.T
                        where = Where(i64(b), i64(h), m0, n0, Sq, Sk, offset)
                        score.finish(scores, smem, work.options, work.scale, where)
                        cuda.syncthreads()
                        tile.own_v.load(smem, do_lines)
                        tile.passing_v.load(smem, v_lines)
                        cuda.syncthreads()
                        dov.clear(d_probs)
                        dov.add(d_probs, smem)  # d_probs [BLOCK_Q, BLOCK_KV] = dO @ V.T
                        if chain.weighs:
                            score.weights(smem, work.options, where)
                        for i in range(qk.rows):
                            m = m0 + line * qk.rows + i
                            lse_row, delta_row = num.zero, num.zero
                            if m < Sq:
                                lse_row = num.base(x.lse.data[start(x.lse, b, h, m)])
                                delta_row = x.delta.data[start(x.delta, b, h, m)]
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
        one_row, one_column = bias.Sq == 1, bias.Sk == 1
        rows, columns = 1 if one_row else BLOCK_Q, 1 if one_column else BLOCK_KV
        for place in range(tid, rows * columns, THREADS):
            r, c = place // columns, place % columns
            if (m_own + r < bias.Sq) & (n_own + c < bias.Sk):
                total, rest = num.zero, num.zero
                for row in range(r, BLOCK_Q if one_row else r + 1):
                    for column in range(c, BLOCK_KV if one_column else c + 1):
                        total, rest = num.add_compensated(total, rest, smem[tile.d_scores.place(row, column)])
                strides = dbias.strides
                at = i64(b_own) * strides[0] + i64(h_own) * strides[1]
                mem.store(dbias.data, at + i64(m_own + r) * strides[2] + i64(n_own + c) * strides[3], total)

    return flash_attention_dbias
