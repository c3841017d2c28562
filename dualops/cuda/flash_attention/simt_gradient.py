"""dk, dv and dq of attention without tensor cores. Dao 2023, arXiv:2307.08691, Alg. 2, without its atomics.

A block of 16 x 16 threads has BLOCK_KV keys of one key head and visits all queries that see them, tile after tile, so
that every sum has one owner and one order. Rows are keys, columns queries.

    1  for each query head of the group, for each tile of BLOCK_Q queries that see some of the keys:
    2      S.T [BLOCK_KV, BLOCK_Q] = scale * K @ Q.T, through the options; P.T = exp(S.T - lse)
    3      dP.T = weight * V @ dO.T;   dS.T = P.T * (dP.T - delta) * slope
    4      dv [BLOCK_KV, Dv] += (weight * P.T) @ dO
    5      dk [BLOCK_KV, D] += dS.T @ Q
    6  dk *= scale

For dq a block has BLOCK_Q queries of one head and visits keys; rows are queries.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      S [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T, through the options; P = exp(S - lse)
    3      dP = weight * dO @ V.T;   dS = P * (dP - delta) * slope
    4      dq [BLOCK_Q, D] += dS @ K
    5  dq *= scale

-0 marks elements of P and dS that do not count (`simt_forward`).

Shared memory: K and V, Q and dO, P.T and dS.T (`BackwardConfig.layout`). With `share`, K and V take turns in one place,
Q and dO in another, and are read again for each tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..compiler.backend import Kernel, builds, cuda, i64, kernel
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_ab, mma_abt
from ..tile.shared import Shared, Tile
from ..tile.storage import storage
from .arguments import Variant, array_type, gradient_inputs_type, size_types, spans
from .options import chain_of
from .saved_lse import exponential_of
from .tiles import Where, lines, score_tile


class BackwardLayout(NamedTuple):
    """Tiles in shared memory: the pair that the block owns (K and V, or Q and dO), the other pair, and scores."""

    own: Tile  # [rows, D]
    own_v: Tile  # [rows, Dv]
    passing: Tile  # [columns, D]
    passing_v: Tile  # [columns, Dv]
    probs: Tile  # [rows, columns]
    d_scores: Tile  # [rows, columns]; the same as probs if there is one tile of scores
    nbytes: int


@dataclass(frozen=True)
class BackwardConfig:
    """Scores of a thread: tile_rows along the side that the block owns, tile_columns along the other."""

    tile_rows: int
    tile_columns: int
    share: bool = False  # the operands of a side take turns in one place
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        return LANES * self.tile_rows

    @property
    def columns(self) -> int:
        return LANES * self.tile_columns

    def layout(self, D: int, Dv: int, dtype: str, tiles_of_scores: int) -> BackwardLayout:
        shared = Shared(dtype, THREADS)
        own = shared.tile(self.rows, D)
        own_v = shared.tile(self.rows, Dv, over=own if self.share else None)
        passing = shared.tile(self.columns, D, 64)
        passing_v = shared.tile(self.columns, Dv, 64, over=passing if self.share else None)
        scores = [shared.tile(self.rows, self.columns) for _ in range(tiles_of_scores)]
        return BackwardLayout(own, own_v, passing, passing_v, scores[0], scores[-1], shared.nbytes)

    def shared_bytes(self, D: int, Dv: int, dtype: str, tiles_of_scores: int) -> int:
        return self.layout(D, Dv, dtype, tiles_of_scores).nbytes


@builds
def build_dkv(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dkv(dk, dv, x, work). x: `GradientInputs`."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    exponential = exponential_of(mem.number)
    chain, span = chain_of(variant.having, variant.dtype, gradient=True), spans(variant.varlen)
    tile = config.layout(variant.D, variant.Dv, variant.dtype, 2)
    kq = mma_abt(mem.number, tile.own, tile.passing, config.tile_rows, config.tile_columns)
    vdo = mma_abt(mem.number, tile.own_v, tile.passing_v, config.tile_rows, config.tile_columns)
    pdo = mma_ab(mem.number, tile.probs, tile.passing_v, config.tile_rows)
    dsq = mma_ab(mem.number, tile.d_scores, tile.passing, config.tile_rows)
    score = score_tile(chain, variant.dtype, kq, tile.probs, gradient=True, transposed=True)
    d_score_tile = score_tile(chain, variant.dtype, kq, tile.d_scores, gradient=True, transposed=True)
    BLOCK_KV, BLOCK_Q = config.rows, config.columns

    array, inputs, sizes = array_type(variant), gradient_inputs_type(variant), size_types(variant)

    @kernel(array, array, inputs, sizes, threads=THREADS, min_blocks=config.min_blocks)
    def flash_attention_dkv(dk, dv, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        kv_blocks = (work.Sk + BLOCK_KV - 1) // BLOCK_KV
        head = cuda.blockIdx.x // kv_blocks
        n0 = cuda.blockIdx.x % kv_blocks * BLOCK_KV
        heads_kv = work.H // work.group
        b, h_kv = i64(head // heads_kv), i64(head % heads_kv)
        q_first, k_first, Sq, Sk = span.of_batch(work.lengths, b, work.Sq, work.Sk)
        if n0 >= Sk:
            return
        offset = work.aligned * (Sk - Sq)
        k_lines, v_lines = lines(x.k, b, h_kv, k_first + n0, Sk - n0), lines(x.v, b, h_kv, k_first + n0, Sk - n0)
        if not config.share:
            tile.own.load(smem, k_lines)
            tile.own_v.load(smem, v_lines)

        n = n0 + line * kq.rows  # my first key
        dk_acc, dv_acc = dsq.fragment(), pdo.fragment()
        dsq.clear(dk_acc)
        pdo.clear(dv_acc)
        scores, d_probs, slopes = kq.fragment(), kq.fragment(), kq.fragment()

        m_first, m_end = chain.query_range(work.options, n0, min(n0 + BLOCK_KV, Sk), offset, Sq)
        m_first = m_first // BLOCK_Q * BLOCK_Q
        for h in range(h_kv * work.group, (h_kv + 1) * work.group):
            for m0 in range(m_first, m_end, BLOCK_Q):
                q_lines, do_lines = lines(x.q, b, h, q_first + m0, Sq - m0), lines(x.do, b, h, q_first + m0, Sq - m0)
                cuda.syncthreads()
                if config.share:
                    tile.own.load(smem, k_lines)
                strange_q = tile.passing.load(smem, q_lines)
                strange_do = strange_q
                if not config.share:
                    strange_do = tile.passing_v.load(smem, do_lines)
                cuda.syncthreads()

                kq.clear(scores)
                kq.add(scores, smem)  # scores [BLOCK_KV, BLOCK_Q] = K @ Q.T
                where = Where(b, h, m0, n0, Sq, Sk, offset)
                if chain.bends:
                    score.slopes(slopes, scores, smem, work.options, work.scale, where)
                score.finish(scores, smem, work.options, work.scale, where)

                if config.share:
                    cuda.syncthreads()
                    tile.own_v.load(smem, v_lines)
                    strange_do = tile.passing_v.load(smem, do_lines)
                    cuda.syncthreads()
                vdo.clear(d_probs)
                vdo.add(d_probs, smem)  # d_probs [BLOCK_KV, BLOCK_Q] = V @ dO.T
                if chain.weighs:
                    d_score_tile.weights(smem, work.options, where)
                for j in range(kq.columns):
                    m = m0 + lane + LANES * j
                    lse_row, delta_row = num.zero, num.zero
                    if m < Sq:
                        lse_row = num.base(x.lse.data[start(x.lse, b, h, q_first + m)])
                        delta_row = x.delta.data[start(x.delta, b, h, q_first + m)]
                    for i in range(kq.rows):
                        e = i * kq.columns + j
                        prob = exponential(scores[e], lse_row)
                        weighted, d_prob = prob, d_probs[e]
                        if chain.weighs:
                            weighted *= smem[d_score_tile.at(e)]
                            d_prob *= smem[d_score_tile.at(e)]
                        d_score = prob * (d_prob - delta_row)
                        if chain.bends:
                            d_score = d_score * slopes[e] + num.zero  # a slope of 0 gives no -0
                        counts = score.counts(scores[e], lse_row)
                        smem[score.at(e)] = weighted if counts else num.minus_zero
                        smem[d_score_tile.at(e)] = d_score if counts else num.minus_zero

                if cuda.syncthreads_or(strange_do):
                    pdo.add_counted(dv_acc, smem, BLOCK_Q)
                else:
                    pdo.add(dv_acc, smem)  # dv [BLOCK_KV, Dv] += P.T @ dO
                if config.share:
                    cuda.syncthreads()
                    tile.passing.load(smem, q_lines)
                if cuda.syncthreads_or(strange_q):
                    dsq.add_counted(dk_acc, smem, BLOCK_Q)
                else:
                    dsq.add(dk_acc, smem)  # dk [BLOCK_KV, D] += dS.T @ Q

        k_out = span.key_out(work.lengths, b)
        for i in range(kq.rows):
            if n + i < Sk:
                k_row, v_row = start(dk, b, h_kv, k_out + n + i), start(dv, b, h_kv, k_out + n + i)
                for c in range(dsq.columns):
                    if dsq.column(c) < variant.D:
                        mem.store(dk.data, k_row + dsq.column(c), dk_acc[i * dsq.columns + c] * work.scale)
                for c in range(pdo.columns):
                    if pdo.column(c) < variant.Dv:
                        mem.store(dv.data, v_row + pdo.column(c), dv_acc[i * pdo.columns + c])

    return flash_attention_dkv


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

    array, inputs, sizes = array_type(variant), gradient_inputs_type(variant), size_types(variant)

    @kernel(array, inputs, sizes, threads=THREADS, min_blocks=config.min_blocks)
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
