"""Attention forward without tensor cores: any GPU, any dtype, any D and Dv to 512. Dao 2023, arXiv:2307.08691, Alg. 1.

A block of 16 x 16 threads has BLOCK_Q queries of one head. Q stays in shared memory; K and V pass through one buffer.

    1  for each tile of BLOCK_KV keys that some of the queries see:
    2      scores [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T           a thread has tile_q x tile_kv of them in registers
    3      options change the scores; -inf where a mask hides one
    4      row_max, rescale = exp(old maximum - new maximum)      16 lanes share a row
    5      probs = exp(scores - row_max), to shared memory; row_sum, acc rescaled
    6      acc [BLOCK_Q, Dv] += probs @ V
    7  o = acc / row_sum,  lse = row_max + log(row_sum)

Tiles that no query sees are skipped. -0 marks a probability that does not count, and adds nothing. If a tile of V holds
a NaN or an infinity, marked elements are left out, so that a hidden NaN does not spread.

Shared memory: `ForwardConfig.layout`, itemsize * (BLOCK_Q * (D4 + 4) + BLOCK_KV * max(D4 + 4, Dv64 + 4) + BLOCK_Q *
(BLOCK_KV + 4)) with D4, Dv64 the widths rounded up to 4 and 64. Registers: tile_q * (tile_kv + Dv64 / 16) numbers and
about 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..compiler.backend import Kernel, builds, cuda, kernel
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, mma_ab, mma_abt
from ..tile.rows import lane_reductions
from ..tile.shared import Shared, Tile
from ..tile.storage import storage
from .arguments import Variant, array_type, inputs_type, size_types, statistic_type
from .options import chain_of
from .tiles import Where, blocks, lines, score_tile


class ForwardLayout(NamedTuple):
    """Tiles in shared memory. K and V take turns in one place."""

    q: Tile  # [BLOCK_Q, D]
    k: Tile  # [BLOCK_KV, D]
    v: Tile  # [BLOCK_KV, Dv]
    probs: Tile  # [BLOCK_Q, BLOCK_KV]
    nbytes: int


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

    def layout(self, D: int, Dv: int, dtype: str) -> ForwardLayout:
        shared = Shared(dtype, THREADS)
        q = shared.tile(self.block_q, D)
        k = shared.tile(self.block_kv, D)
        v = shared.tile(self.block_kv, Dv, 64, over=k)
        probs = shared.tile(self.block_q, self.block_kv)
        return ForwardLayout(q, k, v, probs, shared.nbytes)

    def shared_bytes(self, D: int, Dv: int, dtype: str) -> int:
        return self.layout(D, Dv, dtype).nbytes


@builds
def build_forward(config: ForwardConfig, variant: Variant, with_lse: bool) -> Kernel:
    """flash_attention_simt(o, lse, x, work). x: `Inputs`."""
    mem, owned = storage(variant.dtype), blocks(variant.varlen, config.block_q)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)
    chain, tile = chain_of(variant.having, variant.dtype), config.layout(variant.D, variant.Dv, variant.dtype)
    qk = mma_abt(mem.number, tile.q, tile.k, config.tile_q, config.tile_kv)
    pv = mma_ab(mem.number, tile.probs, tile.v, config.tile_q)
    score = score_tile(chain, variant.dtype, qk, tile.probs)

    @kernel(
        array_type(variant),
        statistic_type(variant),
        inputs_type(variant),
        size_types(variant),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def flash_attention_simt(o, lse, x, work):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        b, h, h_kv, m0, q_first, k_first, Sq, Sk = owned.of_queries(work)
        if m0 >= Sq:
            return
        offset = work.aligned * (Sk - Sq)
        tile.q.load(smem, lines(x.q, b, h, q_first + m0, Sq - m0))

        m = m0 + line * qk.rows  # my first query
        row_max = cuda.local.array(qk.rows, mem.number)
        row_sum = cuda.local.array(qk.rows, mem.number)  # my share; lanes add theirs after the loop
        for i in range(qk.rows):
            row_max[i] = chain.sink(work.options, h)  # -inf if there is none
            row_sum[i] = num.zero
            if lane == 0:
                row_sum[i] = num.exp(row_max[i] - num.base(row_max[i]))
        acc = pv.fragment()
        pv.clear(acc)
        scores = qk.fragment()

        n_first, n_end = chain.key_range(work.options, m0, min(m0 + config.block_q, Sq), offset, Sk)
        for n0 in range(n_first // config.block_kv * config.block_kv, n_end, config.block_kv):
            cuda.syncthreads()
            tile.k.load(smem, lines(x.k, b, h_kv, k_first + n0, Sk - n0))
            cuda.syncthreads()
            qk.clear(scores)
            qk.add(scores, smem)  # scores [BLOCK_Q, BLOCK_KV] = Q @ K.T
            where = Where(b, h, m0, n0, Sq, Sk, offset)
            score.finish(scores, smem, work.options, work.scale, where)
            if chain.weighs:
                score.weights(smem, work.options, where)
            for i in range(qk.rows):
                tile_max = num.minus_inf
                for j in range(qk.columns):
                    tile_max = num.maximum(tile_max, scores[i * qk.columns + j])
                new_max = num.maximum(row_max[i], lanes.max(tile_max))
                base = num.base(new_max)
                rescale = num.exp(row_max[i] - base)
                row_max[i] = new_max
                row_sum[i] *= rescale
                for j in range(qk.columns):
                    e = i * qk.columns + j
                    prob = num.exp(scores[e] - base)
                    row_sum[i] += prob
                    if chain.weighs:
                        prob *= smem[score.at(e)]
                    smem[score.at(e)] = num.minus_zero if scores[e] == num.minus_inf else prob
                for c in range(pv.columns):
                    acc[i * pv.columns + c] *= rescale
            cuda.syncthreads()
            non_finite = tile.v.load(smem, lines(x.v, b, h_kv, k_first + n0, Sk - n0))
            if cuda.syncthreads_or(non_finite):
                pv.add_counted(acc, smem, config.block_kv)
            else:
                pv.add(acc, smem)  # acc [BLOCK_Q, Dv] += P @ V

        for i in range(qk.rows):
            total = lanes.sum(row_sum[i])
            if m + i < Sq:
                inverse = num.zero
                if total != num.zero:
                    inverse = num.one / total
                row = start(o, b, h, q_first + m + i)
                for c in range(pv.columns):
                    if pv.column(c) < variant.Dv:
                        mem.store(o.data, row + pv.column(c), acc[i * pv.columns + c] * inverse)
                if with_lse and lane == 0:
                    lse.data[start(lse, b, h, q_first + m + i)] = num.base(row_max[i]) + num.log(total)

    return flash_attention_simt
