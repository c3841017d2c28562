"""dk and dv of attention without tensor cores. Dao 2023, arXiv:2307.08691, Alg. 2, without its atomics.

A block of 16 x 16 threads takes BLOCK_KV keys of one key head, and all that looks at them, one tile after another, so
that every sum has one owner and one order. Rows are keys here, columns queries.

    1  for each query head of the group, for each tile of BLOCK_Q queries that see some of the keys:
    2      S.T [BLOCK_KV, BLOCK_Q] = scale * K @ Q.T, through the options; P.T = exp(S.T - lse)
    3      dP.T = weight * V @ dO.T;   dS.T = P.T * (dP.T - delta) * slope
    4      dv [BLOCK_KV, Dv] += (weight * P.T) @ dO
    5      dk [BLOCK_KV, D] += dS.T @ Q
    6  dk *= scale

What does not count is -0 in P.T and dS.T, see `simt_forward`.

Shared memory: K and V, Q and dO, P.T and dS.T; with `share` one place for K and V and one for Q and dO, which are then
read again in every round. `BackwardConfig.shared_bytes` is the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import align_up
from ..backend import Kernel, builds, cuda, i64, kernel
from ..tile.numbers import numbers
from ..tile.storage import storage
from ..views import start
from .arguments import Variant, array_type, size_types, spans, statistic_type
from .options import chain_of
from .tiles import LANES, THREADS, Where, columns_of, row_of, score_tiles, tiles


@dataclass(frozen=True)
class BackwardConfig:
    """Scores a thread holds: tile_rows of the side that the block owns, tile_columns of the side that passes by."""

    tile_rows: int
    tile_columns: int
    share: bool = False  # one place for both operands of a side
    min_blocks: int = 1

    @property
    def rows(self) -> int:
        return LANES * self.tile_rows

    @property
    def columns(self) -> int:
        return LANES * self.tile_columns

    def places(self, D: int, Dv: int) -> tuple[int, int, int, int, int]:
        """Where in shared memory begin: own and second own operand, passing and second passing operand, scores."""
        own = self.rows * row_of(D), self.rows * row_of(Dv)
        passing = self.columns * row_of(align_up(D, 64)), self.columns * row_of(align_up(Dv, 64))
        if self.share:
            return 0, 0, max(own), max(own), max(own) + max(passing)
        return 0, own[0], sum(own), sum(own) + passing[0], sum(own) + sum(passing)

    def shared_bytes(self, D: int, Dv: int, dtype: str, tiles_of_scores: int) -> int:
        count = self.places(D, Dv)[-1] + tiles_of_scores * self.rows * row_of(self.columns)
        return count * (8 if dtype == "float64" else 4)


@builds
def build_dkv(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dkv(dk, dv, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options)."""
    mem = storage(variant.dtype)
    num = numbers(mem.number)
    chain, span = chain_of(variant.having, variant.dtype, gradient=True), spans(variant.varlen)

    TILE_KV, TILE_Q, BLOCK_KV, BLOCK_Q = config.tile_rows, config.tile_columns, config.rows, config.columns
    tile = tiles(variant.dtype, TILE_KV, TILE_Q)
    P_ROW = row_of(BLOCK_Q)
    score_tile = score_tiles(chain, variant.dtype, TILE_KV, TILE_Q, P_ROW, transposed=True)
    BENDS, WEIGHS, SHARE = chain.bends, chain.weighs, config.share
    D, Dv, D4, DV4 = variant.D, variant.Dv, align_up(variant.D, 4), align_up(variant.Dv, 4)
    GROUPS, V_GROUPS = columns_of(D) // 4, columns_of(Dv) // 4
    K_ROW, V_ROW, Q_ROW, DO_ROW = row_of(D), row_of(Dv), row_of(align_up(D, 64)), row_of(align_up(Dv, 64))
    K, V, Q, DO, P = config.places(D, Dv)
    DS = P + BLOCK_KV * P_ROW
    N_SCORES, N_FRAGS, N_SLOPES = TILE_KV * TILE_Q, max(4 * TILE_Q, 16), TILE_KV * TILE_Q if BENDS else 1
    N_DK, N_DV = TILE_KV * columns_of(D), TILE_KV * columns_of(Dv)

    @kernel(
        *[array_type(variant)] * 6,
        *[statistic_type(variant)] * 2,
        *size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_dkv(dk, dv, q, k, v, do, lse, delta, H, group, Sq, Sk, aligned, scale, lengths, options):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        kv_blocks = (Sk + BLOCK_KV - 1) // BLOCK_KV
        head = cuda.blockIdx.x // kv_blocks
        n0 = cuda.blockIdx.x % kv_blocks * BLOCK_KV
        heads_kv = H // group
        b, h_kv = i64(head // heads_kv), i64(head % heads_kv)
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, Sq, Sk)
        if n0 >= Sk:
            return
        offset = aligned * (Sk - Sq)
        k_start, v_start = start(k, b, h_kv, k_first + n0), start(v, b, h_kv, k_first + n0)
        if not SHARE:
            tile.load(smem, K, K_ROW, BLOCK_KV, D, k.data, k_start, k.strides[2], Sk - n0)
            tile.load(smem, V, V_ROW, BLOCK_KV, Dv, v.data, v_start, v.strides[2], Sk - n0)

        n = n0 + line * TILE_KV  # my first key
        dk_acc = cuda.local.array(N_DK, mem.number)
        dv_acc = cuda.local.array(N_DV, mem.number)
        for i in range(N_DK):
            dk_acc[i] = num.zero
        for i in range(N_DV):
            dv_acc[i] = num.zero
        scores = cuda.local.array(N_SCORES, mem.number)
        d_probs = cuda.local.array(N_SCORES, mem.number)
        slopes = cuda.local.array(N_SLOPES, mem.number)
        frag = cuda.local.array(4, mem.number)
        frags = cuda.local.array(N_FRAGS, mem.number)

        m_first, m_end = chain.query_range(options, n0, min(n0 + BLOCK_KV, Sk), offset, Sq)
        m_first = max(i64(m_first), 0) // BLOCK_Q * BLOCK_Q
        for h in range(h_kv * group, (h_kv + 1) * group):
            for m0 in range(m_first, m_end, BLOCK_Q):
                q_start, do_start = start(q, b, h, q_first + m0), start(do, b, h, q_first + m0)
                cuda.syncthreads()
                if SHARE:
                    tile.load(smem, K, K_ROW, BLOCK_KV, D, k.data, k_start, k.strides[2], Sk - n0)
                strange_q = tile.load(smem, Q, Q_ROW, BLOCK_Q, D, q.data, q_start, q.strides[2], Sq - m0)
                strange_do = strange_q
                if not SHARE:
                    strange_do = tile.load(smem, DO, DO_ROW, BLOCK_Q, Dv, do.data, do_start, do.strides[2], Sq - m0)
                cuda.syncthreads()

                tile.abt(scores, frag, frags, smem, K, K_ROW, Q, Q_ROW, D4, line, lane)
                where = Where(b, h, n, m0 + lane, Sk, Sq, offset)
                whole = (m0 + BLOCK_Q <= Sq) & (n0 + BLOCK_KV <= Sk)
                whole &= chain.full(options, m0, m0 + BLOCK_Q, n0, n0 + BLOCK_KV, offset)
                if BENDS:
                    score_tile.slopes(slopes, scores, smem, P, options, scale, where)
                score_tile.finish(scores, smem, P, options, whole, scale, where)

                if SHARE:
                    cuda.syncthreads()
                    tile.load(smem, V, V_ROW, BLOCK_KV, Dv, v.data, v_start, v.strides[2], Sk - n0)
                    strange_do = tile.load(smem, DO, DO_ROW, BLOCK_Q, Dv, do.data, do_start, do.strides[2], Sq - m0)
                    cuda.syncthreads()
                tile.abt(d_probs, frag, frags, smem, V, V_ROW, DO, DO_ROW, DV4, line, lane)
                if WEIGHS:
                    score_tile.weights(smem, DS, options, where)
                for j in range(TILE_Q):
                    m = m0 + lane + LANES * j
                    lse_row, delta_row = num.zero, num.zero
                    if m < Sq:
                        lse_row = num.base(lse.data[start(lse, b, h, q_first + m)])
                        delta_row = delta.data[start(delta, b, h, q_first + m)]
                    for i in range(TILE_KV):
                        e = i * TILE_Q + j
                        my_place = tile.mine(0, P_ROW, e)
                        prob = num.exp(scores[e] - lse_row)
                        weighted, d_prob = prob, d_probs[e]
                        if WEIGHS:
                            weighted *= smem[DS + my_place]
                            d_prob *= smem[DS + my_place]
                        d_score = prob * (d_prob - delta_row)
                        if BENDS:
                            d_score = d_score * slopes[e] + num.zero  # a slope of 0 gives no -0
                        counts = scores[e] != num.minus_inf
                        smem[P + my_place] = weighted if counts else num.minus_zero
                        smem[DS + my_place] = d_score if counts else num.minus_zero

                if cuda.syncthreads_or(strange_do):
                    tile.ab_counted(dv_acc, frag, frags, smem, P, P_ROW, DO, DO_ROW, BLOCK_Q, V_GROUPS, line, lane)
                else:
                    tile.ab(dv_acc, frag, frags, smem, P, P_ROW, DO, DO_ROW, BLOCK_Q, V_GROUPS, line, lane)
                if SHARE:
                    cuda.syncthreads()
                    tile.load(smem, Q, Q_ROW, BLOCK_Q, D, q.data, q_start, q.strides[2], Sq - m0)
                if cuda.syncthreads_or(strange_q):
                    tile.ab_counted(dk_acc, frag, frags, smem, DS, P_ROW, Q, Q_ROW, BLOCK_Q, GROUPS, line, lane)
                else:
                    tile.ab(dk_acc, frag, frags, smem, DS, P_ROW, Q, Q_ROW, BLOCK_Q, GROUPS, line, lane)

        for i in range(TILE_KV):
            if n + i < Sk:
                k_row, v_row = start(dk, b, h_kv, k_first + n + i), start(dv, b, h_kv, k_first + n + i)
                for c in range(4):
                    for g in range(GROUPS):
                        column = g * 64 + 4 * lane + c
                        if column < D:
                            mem.store(dk.data, k_row + column, dk_acc[(i * GROUPS + g) * 4 + c] * scale)
                    for g in range(V_GROUPS):
                        column = g * 64 + 4 * lane + c
                        if column < Dv:
                            mem.store(dv.data, v_row + column, dv_acc[(i * V_GROUPS + g) * 4 + c])

    return flash_attention_dkv
