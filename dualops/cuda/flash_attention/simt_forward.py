"""Attention forward without tensor cores: any GPU, any dtype, any D and Dv to 512. Dao 2023, arXiv:2307.08691, Alg. 1.

A block of 16 x 16 threads takes BLOCK_Q queries of one head; Q stays in shared memory, K and V pass through one buffer.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      scores [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T           a thread has tile_q x tile_kv of them in registers
    3      scores through the options; -inf where a mask is
    4      row_max, rescale = exp(old maximum - new maximum)      16 lanes share a row
    5      probs = exp(scores - row_max), to shared memory; row_sum, acc rescaled
    6      acc [BLOCK_Q, Dv] += probs @ V
    7  o = acc / row_sum,  lse = row_max + log(row_sum)

A tile that no query sees is not visited. A probability that does not count is kept as -0: it adds nothing, and where a
tile of V holds a NaN or an infinity, it says what to leave out, so that a NaN that is not seen stays where it is.

Shared memory: itemsize * (BLOCK_Q * (D4 + 4) + BLOCK_KV * max(D4 + 4, Dv64 + 4) + BLOCK_Q * (BLOCK_KV + 4)) with D4,
Dv64 the widths rounded up to 4 and 64. Registers: tile_q * (tile_kv + Dv64 / 16) numbers and about 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arrays import align_up
from ..backend import Kernel, builds, cuda, i64, kernel
from ..tile.numbers import numbers
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from ..views import start
from .arguments import Variant, array_type, size_types, spans, statistic_type
from .options import chain_of
from .tiles import LANES, THREADS, Where, columns_of, row_of, score_tiles, tiles


@dataclass(frozen=True)
class ForwardConfig:
    """Scores a thread holds: tile_q rows x tile_kv columns."""

    tile_q: int
    tile_kv: int
    min_blocks: int = 1

    @property
    def block_q(self) -> int:
        return LANES * self.tile_q

    @property
    def block_kv(self) -> int:
        return LANES * self.tile_kv

    def shared_bytes(self, D: int, Dv: int, dtype: str) -> int:
        kv_row = max(row_of(D), row_of(align_up(Dv, 64)))
        count = self.block_q * row_of(D) + self.block_kv * kv_row + self.block_q * row_of(self.block_kv)
        return count * (8 if dtype == "float64" else 4)


@builds
def build_forward(config: ForwardConfig, variant: Variant, with_lse: bool) -> Kernel:
    """flash_attention_simt(o, lse, q, k, v, H, group, Sq, Sk, aligned, scale, lengths, options).

    aligned: 1 where the last query stands at the last key, 0 where the first one stands at the first.
    """
    mem = storage(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)
    chain, span = chain_of(variant.having, variant.dtype), spans(variant.varlen)

    TILE_Q, TILE_KV, BLOCK_Q, BLOCK_KV = config.tile_q, config.tile_kv, config.block_q, config.block_kv
    tile = tiles(variant.dtype, TILE_Q, TILE_KV)
    D, Dv, D4 = variant.D, variant.Dv, align_up(variant.D, 4)
    COLUMNS, GROUPS = columns_of(Dv), columns_of(Dv) // 4  # of acc a thread holds
    ROW, V_ROW, PROBS_ROW = row_of(D), row_of(align_up(Dv, 64)), row_of(BLOCK_KV)
    KV = BLOCK_Q * ROW  # where K and V begin in shared memory, and the probabilities
    PROBS = KV + BLOCK_KV * max(ROW, V_ROW)
    score_tile = score_tiles(chain, variant.dtype, TILE_Q, TILE_KV, PROBS_ROW, transposed=False)
    WEIGHS, WITH_LSE = chain.weighs, with_lse
    N_SCORES, N_ACC, N_KEYS = TILE_Q * TILE_KV, TILE_Q * COLUMNS, max(4 * TILE_KV, 16)

    @kernel(
        array_type(variant),
        statistic_type(variant),
        *[array_type(variant)] * 3,
        *size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_simt(o, lse, q, k, v, H, group, Sq, Sk, aligned, scale, lengths, options):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        q_blocks = (Sq + BLOCK_Q - 1) // BLOCK_Q
        head = cuda.blockIdx.x // q_blocks
        m0 = (q_blocks - 1 - cuda.blockIdx.x % q_blocks) * BLOCK_Q  # the last first: under a causal mask the longest
        b, h = i64(head // H), i64(head % H)
        h_kv = h // group
        q_first, k_first, Sq, Sk = span.of_batch(lengths, b, Sq, Sk)
        if m0 >= Sq:
            return
        offset = aligned * (Sk - Sq)
        tile.load(smem, 0, ROW, BLOCK_Q, D, q.data, start(q, b, h, q_first + m0), q.strides[2], Sq - m0)

        m = m0 + line * TILE_Q  # my first query
        row_max = cuda.local.array(TILE_Q, mem.number)
        row_sum = cuda.local.array(TILE_Q, mem.number)  # my share; the lanes meet after the loop
        for i in range(TILE_Q):
            row_max[i] = chain.sink(options, h)  # -inf where there is none
            row_sum[i] = num.zero
            if lane == 0:
                row_sum[i] = num.exp(row_max[i] - num.base(row_max[i]))
        acc = cuda.local.array(N_ACC, mem.number)
        for i in range(N_ACC):
            acc[i] = num.zero
        scores = cuda.local.array(N_SCORES, mem.number)
        frag = cuda.local.array(4, mem.number)  # of a row of Q, then of P
        frags = cuda.local.array(N_KEYS, mem.number)  # of rows of K, then of V

        n_first, n_end = chain.key_range(options, m0, min(m0 + BLOCK_Q, Sq), offset, Sk)
        for n0 in range(max(i64(n_first), 0) // BLOCK_KV * BLOCK_KV, n_end, BLOCK_KV):
            cuda.syncthreads()
            tile.load(smem, KV, ROW, BLOCK_KV, D, k.data, start(k, b, h_kv, k_first + n0), k.strides[2], Sk - n0)
            cuda.syncthreads()
            tile.abt(scores, frag, frags, smem, 0, ROW, KV, ROW, D4, line, lane)
            whole = (m0 + BLOCK_Q <= Sq) & (n0 + BLOCK_KV <= Sk)
            whole &= chain.full(options, m0, m0 + BLOCK_Q, n0, n0 + BLOCK_KV, offset)
            where = Where(b, h, m, n0 + lane, Sq, Sk, offset)
            score_tile.finish(scores, smem, PROBS, options, whole, scale, where)
            if WEIGHS:
                score_tile.weights(smem, PROBS, options, where)
            for i in range(TILE_Q):
                tile_max = num.minus_inf
                for j in range(TILE_KV):
                    tile_max = num.maximum(tile_max, scores[i * TILE_KV + j])
                new_max = num.maximum(row_max[i], lanes.max(tile_max))
                base = num.base(new_max)
                rescale = num.exp(row_max[i] - base)
                row_max[i] = new_max
                row_sum[i] *= rescale
                for j in range(TILE_KV):
                    prob = num.exp(scores[i * TILE_KV + j] - base)
                    row_sum[i] += prob
                    my_place = tile.mine(PROBS, PROBS_ROW, i * TILE_KV + j)
                    if WEIGHS:
                        prob *= smem[my_place]
                    smem[my_place] = num.minus_zero if scores[i * TILE_KV + j] == num.minus_inf else prob
                for c in range(COLUMNS):
                    acc[i * COLUMNS + c] *= rescale
            cuda.syncthreads()
            strange = tile.load(
                smem, KV, V_ROW, BLOCK_KV, Dv, v.data, start(v, b, h_kv, k_first + n0), v.strides[2], Sk - n0
            )
            if cuda.syncthreads_or(strange):
                tile.ab_counted(acc, frag, frags, smem, PROBS, PROBS_ROW, KV, V_ROW, BLOCK_KV, GROUPS, line, lane)
            else:
                tile.ab(acc, frag, frags, smem, PROBS, PROBS_ROW, KV, V_ROW, BLOCK_KV, GROUPS, line, lane)

        for i in range(TILE_Q):
            total = lanes.sum(row_sum[i])
            if m + i < Sq:
                inverse = num.zero
                if total != num.zero:
                    inverse = num.one / total
                row = start(o, b, h, q_first + m + i)
                for g in range(GROUPS):
                    for c in range(4):
                        column = g * 64 + 4 * lane + c
                        if column < Dv:
                            mem.store(o.data, row + column, acc[(i * GROUPS + g) * 4 + c] * inverse)
                if WITH_LSE and lane == 0:
                    lse.data[start(lse, b, h, q_first + m + i)] = num.base(row_max[i]) + num.log(total)

    return flash_attention_simt
