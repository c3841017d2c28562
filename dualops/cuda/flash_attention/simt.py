"""Attention forward without tensor cores: any GPU, any dtype, any D and Dv to 512. Dao 2023, arXiv:2307.08691, Alg. 1.

A block of 16 x 16 threads takes BLOCK_Q queries of one head; Q stays in shared memory, K and V pass through one buffer.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      scores [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T           a thread has tile_q x tile_kv of them in registers
    3      row_max, rescale = exp(old maximum - new maximum)      16 lanes share a row
    4      probs = exp(scores - row_max), to shared memory; row_sum, acc rescaled
    5      acc [BLOCK_Q, Dv] += probs @ V
    6  o = acc / row_sum,  lse = row_max + log(row_sum)

A tile that no query sees is not visited; where some queries see a key and others not, what they don't see is masked in
the scores and left out of the product, so that a NaN there stays there.

Shared memory: itemsize * (BLOCK_Q * (D4 + 4) + BLOCK_KV * max(D4 + 4, Dv64) + BLOCK_Q * (BLOCK_KV + 4)) with D4, Dv64
the widths rounded up to 4 and 64. Registers: tile_q * (tile_kv + Dv64 / 16) numbers and about 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..arrays import align_up
from ..backend import Kernel, builds, cuda, f64, i32, i64, kernel, pointer, verb
from ..tile import lane_reductions, numbers, storage

LANES = 16  # threads that share a row of scores; also the rows of threads in a block
THREADS = LANES * LANES


@dataclass(frozen=True)
class SimtConfig:
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
        d4, dv64 = align_up(D, 4), align_up(Dv, 64)
        count = self.block_q * (d4 + 4) + self.block_kv * max(d4 + 4, dv64) + self.block_q * (self.block_kv + 4)
        return count * (8 if dtype == "float64" else 4)


@builds
def build_forward(config: SimtConfig, dtype: str, D: int, Dv: int, causal: bool, with_lse: bool) -> Kernel:
    """flash_attention_simt(o, lse, q, k, v, H, group, Sq, Sk, offset, scale, strides of o, lse, q, k, v along B, H, S).

    offset: query i sees keys up to i + offset, if causal.
    """
    kept = storage(dtype)
    number, element, load, store = kept.number, kept.element, kept.load, kept.store
    maximum, exp, base_of = numbers(number).maximum, numbers(number).exp, numbers(number).base
    log = numbers(number).log
    load_four = numbers(number).load_four
    lanes_max, lanes_sum = lane_reductions(number, LANES)
    statistic = f64 if number is f64 else number

    TILE_Q, TILE_KV, BLOCK_Q, BLOCK_KV = config.tile_q, config.tile_kv, config.block_q, config.block_kv
    D4, DV64 = align_up(D, 4), align_up(Dv, 64)
    COLUMNS = DV64 // LANES  # of acc a thread holds, in groups of four
    GROUPS = COLUMNS // 4
    ROW = D4 + 4  # stride of a row of Q and K in shared memory: lanes a row apart meet different banks
    PROBS_ROW = BLOCK_KV + 4
    KV_SMEM = BLOCK_Q * ROW
    PROBS_SMEM = KV_SMEM + BLOCK_KV * max(ROW, DV64)
    N_SCORES, N_ACC, N_KEYS = TILE_Q * TILE_KV, TILE_Q * COLUMNS, 4 * TILE_KV
    CAUSAL, WITH_LSE = causal, with_lse
    NOTHING, ZERO = number(-inf), number(0)

    @verb
    def load_rows(smem, to, row_stride, width, rows, padded, x, x_row, stride, end):
        """[rows, padded] of shared memory = rows of x from x_row on, zero beyond `end` rows and `width` columns."""
        for i in range(cuda.threadIdx.x, rows * padded, THREADS):
            r, c = i // padded, i % padded
            value = ZERO
            if (r < end) & (c < width):
                value = load(x, x_row + r * stride + c)
            smem[to + r * row_stride + c] = value

    @verb
    def score(scores, query, keys, smem, line, lane, scale):
        """scores [TILE_Q, TILE_KV] = scale * Q @ K.T"""
        for i in range(N_SCORES):
            scores[i] = ZERO
        for d in range(0, D4, 4):
            for j in range(TILE_KV):
                load_four(keys, 4 * j, smem, KV_SMEM + (lane + LANES * j) * ROW + d)
            for i in range(TILE_Q):
                load_four(query, 0, smem, (line * TILE_Q + i) * ROW + d)
                for j in range(TILE_KV):
                    for c in range(4):
                        scores[i * TILE_KV + j] += query[c] * keys[4 * j + c]
        for i in range(N_SCORES):
            scores[i] *= scale

    @verb
    def mask(scores, limits, n0, lane):
        """Scores of keys beyond their query's limit become -inf."""
        for i in range(TILE_Q):
            for j in range(TILE_KV):
                if n0 + lane + LANES * j > limits[i]:
                    scores[i * TILE_KV + j] = NOTHING

    @verb
    def accumulate(acc, prob, values, smem, line, lane):
        """acc [TILE_Q, COLUMNS] += P @ V"""
        for n in range(0, BLOCK_KV, 4):
            for g in range(GROUPS):
                for k in range(4):
                    load_four(values, 4 * k, smem, KV_SMEM + (n + k) * DV64 + g * 64 + 4 * lane)
                for i in range(TILE_Q):
                    load_four(prob, 0, smem, PROBS_SMEM + (line * TILE_Q + i) * PROBS_ROW + n)
                    for k in range(4):
                        for c in range(4):
                            acc[i * COLUMNS + 4 * g + c] += prob[k] * values[4 * k + c]

    @verb
    def accumulate_visible(acc, smem, line, lane, limits, n0, n1):
        """The same for keys n0 to n1, each where its query sees it."""
        for n in range(n0, n1):
            for i in range(TILE_Q):
                if n <= limits[i]:
                    prob = smem[PROBS_SMEM + (line * TILE_Q + i) * PROBS_ROW + n - n0]
                    for g in range(GROUPS):
                        for c in range(4):
                            value = smem[KV_SMEM + (n - n0) * DV64 + g * 64 + 4 * lane + c]
                            acc[i * COLUMNS + 4 * g + c] += prob * value

    @kernel(
        pointer(element),
        pointer(statistic),
        *[pointer(element)] * 3,
        *[i32] * 5,
        number,
        *[i64] * 15,
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_simt(
        o, lse, q, k, v, H, group, Sq, Sk, offset, scale,
        o_b, o_h, o_s, lse_b, lse_h, lse_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    ):  # fmt: skip
        smem = cuda.shared.array(0, number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        q_blocks = (Sq + BLOCK_Q - 1) // BLOCK_Q
        head = cuda.blockIdx.x // q_blocks
        m_block = cuda.blockIdx.x % q_blocks
        if CAUSAL:
            m_block = q_blocks - 1 - m_block  # long rows first
        m0 = m_block * BLOCK_Q
        b, h = i64(head // H), i64(head % H)
        h_kv = h // group
        load_rows(smem, 0, ROW, D, BLOCK_Q, D4, q, b * q_b + h * q_h + m0 * q_s, q_s, Sq - m0)

        limits = cuda.local.array(TILE_Q, i32)  # last key that my queries see
        row_max = cuda.local.array(TILE_Q, number)
        row_sum = cuda.local.array(TILE_Q, number)
        for i in range(TILE_Q):
            limits[i] = Sk - 1
            if CAUSAL:
                limits[i] = min(Sk - 1, m0 + line * TILE_Q + i + offset)
            row_max[i] = NOTHING
            row_sum[i] = ZERO
        acc = cuda.local.array(N_ACC, number)
        for i in range(N_ACC):
            acc[i] = ZERO
        scores = cuda.local.array(N_SCORES, number)
        four = cuda.local.array(4, number)  # of a row of Q, then of P
        keys = cuda.local.array(N_KEYS, number)
        values = cuda.local.array(16, number)

        n_end, n_full = Sk, Sk  # keys that some query of the block sees, that all see
        if CAUSAL:
            n_end = min(Sk, max(0, m0 + BLOCK_Q + offset))
            n_full = min(Sk, max(0, m0 + offset + 1))
        for n0 in range(0, n_end, BLOCK_KV):
            cuda.syncthreads()
            load_rows(smem, KV_SMEM, ROW, D, BLOCK_KV, D4, k, b * k_b + h_kv * k_h + n0 * k_s, k_s, Sk - n0)
            cuda.syncthreads()
            score(scores, four, keys, smem, line, lane, scale)
            if n0 + BLOCK_KV > n_full:
                mask(scores, limits, n0, lane)
            for i in range(TILE_Q):
                tile_max = NOTHING
                for j in range(TILE_KV):
                    tile_max = maximum(tile_max, scores[i * TILE_KV + j])
                new_max = maximum(row_max[i], lanes_max(tile_max))
                base = base_of(new_max)
                rescale = exp(row_max[i] - base)
                row_max[i] = new_max
                row_sum[i] *= rescale
                for j in range(TILE_KV):
                    prob = exp(scores[i * TILE_KV + j] - base)
                    row_sum[i] += prob  # my share; the lanes meet after the loop
                    smem[PROBS_SMEM + (line * TILE_Q + i) * PROBS_ROW + lane + LANES * j] = prob
                for c in range(COLUMNS):
                    acc[i * COLUMNS + c] *= rescale
            cuda.syncthreads()
            load_rows(smem, KV_SMEM, DV64, Dv, BLOCK_KV, DV64, v, b * v_b + h_kv * v_h + n0 * v_s, v_s, Sk - n0)
            cuda.syncthreads()
            if n0 + BLOCK_KV > n_full:
                accumulate_visible(acc, smem, line, lane, limits, n0, min(n0 + BLOCK_KV, n_end))
            else:
                accumulate(acc, four, values, smem, line, lane)

        for i in range(TILE_Q):
            m = m0 + line * TILE_Q + i
            total = lanes_sum(row_sum[i])
            if m < Sq:
                inverse = ZERO
                if total != ZERO:
                    inverse = number(1) / total
                for g in range(GROUPS):
                    for c in range(4):
                        column = g * 64 + 4 * lane + c
                        if column < Dv:
                            store(o, b * o_b + h * o_h + m * o_s + column, acc[i * COLUMNS + 4 * g + c] * inverse)
                if WITH_LSE and lane == 0:
                    lse[b * lse_b + h * lse_h + m * lse_s] = base_of(row_max[i]) + log(total)

    return flash_attention_simt
