"""delta, dbias and dsinks of attention's gradient, without tensor cores.

    delta = rowsum(do * o) - dlse                          16 lanes a row, four rows at a time
    dsinks_h = -sum(exp(sink_h - lse) * delta)             a block a head; compensated sums (Kahan), then a tree

delta has blocks of 128 threads: 34 microseconds for two arrays of 67 MB on an H200, with 256 threads 43.

dbias is dS, summed over the axes that the bias is broadcast on. A block of 16 x 16 threads has a tile of the bias. It
computes dS of every tile of scores that the bias tile was added to, as in `simt_gradient`: of other batches and heads,
and of other queries or keys if the bias has only one. Then it sums within the tile.

    1  for each batch, head, tile of queries and tile of keys that the tile of the bias was added to:
    2      dS [BLOCK_Q, BLOCK_KV] = P * (weight * dO @ V.T - delta)
    3      total += dS                                     compensated (Kahan): there may be thousands of terms
    4  dbias = total, summed over rows or columns if the bias has one of them

Q and dO take turns in one place of shared memory, K and V in another (`BackwardConfig.share`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, types
from ..launch.views import boundary, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from .arguments import Variant, array_type, gradient_inputs_type, size_types, statistic_type
from .simt_gradient import BackwardConfig, Pair, tile_of_gradient
from .tiles import Where, lines

DELTA_THREADS, EACH = 128, 4
LINES = DELTA_THREADS // LANES
ROWS = LINES * EACH  # of a block


@builds
def build_delta(variant: Variant, with_dlse: bool, aligned: bool) -> Kernel:
    """flash_attention_delta(delta, o, do, dlse, H, S, Dv): for all tokens, of any sequence.

    aligned: rows of o and do start and end at multiples of 16 bytes.
    """
    mem, source = storage(variant.dtype), access(variant.dtype, aligned, once=True)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)

    @kernel(
        statistic_type(variant), *[array_type(variant)] * 2, statistic_type(variant), *[i32] * 3, threads=DELTA_THREADS
    )
    def flash_attention_delta(delta, o, do, dlse, H, S, Dv):
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        blocks = (S + ROWS - 1) // ROWS
        head, m0 = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks * ROWS + line
        b, h = i64(head // H), i64(head % H)
        some_o = cuda.local.array(EACH * source.vector, mem.number)
        some_do = cuda.local.array(EACH * source.vector, mem.number)
        totals = cuda.local.array(EACH, mem.number)
        for r in range(EACH):
            totals[r] = num.zero
        for c in range(lane * source.vector, Dv, LANES * source.vector):
            for r in range(EACH):
                m = m0 + r * LINES
                source.load(some_o, r * source.vector, o.data, start(o, b, h, m) + c, m < S, num.zero)
                source.load(some_do, r * source.vector, do.data, start(do, b, h, m) + c, m < S, num.zero)
            for r in range(EACH):
                for e in range(source.vector):
                    totals[r] += some_o[r * source.vector + e] * some_do[r * source.vector + e]
        for r in range(EACH):
            m, total = m0 + r * LINES, lanes.sum(totals[r])
            if (m < S) & (lane == 0):
                if with_dlse:
                    total -= dlse.data[start(dlse, b, h, m)]
                delta.data[start(delta, b, h, m)] = total

    return flash_attention_delta


class BiasSizes(NamedTuple):
    """Sizes of a bias, 1 along axes that it is broadcast on."""

    B: Any
    H: Any
    Sq: Any
    Sk: Any


@builds
def build_dbias(config: BackwardConfig, variant: Variant) -> Kernel:
    """flash_attention_dbias(dbias, bias, B, x, work). dbias: with strides along B, H, Sq, Sk. bias: `BiasSizes`. x:
    `GradientInputs`.
    """
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    of = tile_of_gradient(config, variant, 1, bends=False)

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
        kv_blocks = (bias.Sk + config.columns - 1) // config.columns
        q_blocks = (bias.Sq + config.rows - 1) // config.rows
        n_own = cuda.blockIdx.x % kv_blocks * config.columns
        m_own = cuda.blockIdx.x // kv_blocks % q_blocks * config.rows
        head = cuda.blockIdx.x // kv_blocks // q_blocks
        b_own, h_own = head // bias.H, head % bias.H
        offset = work.aligned * (Sk - Sq)
        # the scores that the tile was added to
        b_end, h_end = b_own + 1 if bias.B > 1 else B, h_own + 1 if bias.H > 1 else work.H
        m_end, n_end = m_own + 1 if bias.Sq > 1 else Sq, n_own + 1 if bias.Sk > 1 else Sk

        totals, rests, found = of.qk.fragment(), of.qk.fragment(), of.found()
        of.qk.clear(totals)
        of.qk.clear(rests)
        for b in range(b_own, b_end):
            for h in range(h_own, h_end):
                h_kv = h // work.group
                for m0 in range(m_own, m_end, config.rows):
                    seen_first, seen_end = of.chain.key_range(work.options, m0, min(m0 + config.rows, Sq), offset, Sk)
                    mine = Pair(lines(x.q, b, h, m0, Sq - m0), lines(x.do, b, h, m0, Sq - m0))
                    for n0 in range(n_own, n_end, config.columns):
                        if (n0 + config.columns <= seen_first) | (n0 >= seen_end):
                            continue
                        others = Pair(lines(x.k, b, h_kv, n0, Sk - n0), lines(x.v, b, h_kv, n0, Sk - n0))
                        of.compute(smem, found, mine, others, work, Where(i64(b), i64(h), m0, n0, Sq, Sk, offset))
                        for i in range(config.tile_rows):
                            m = m0 + line * config.tile_rows + i
                            lse, delta = of.statistics(x, b, h, m, m < Sq)
                            for j in range(config.tile_columns):
                                e = i * config.tile_columns + j
                                _, d_score = of.gradient(smem, found, e, lse, delta)
                                totals[e], rests[e] = num.add_compensated(totals[e], rests[e], d_score)

        for e in range(of.qk.size):
            smem[of.d_at(e)] = totals[e]
        cuda.syncthreads()
        one_row, one_column = bias.Sq == 1, bias.Sk == 1
        rows, columns = 1 if one_row else config.rows, 1 if one_column else config.columns
        for place in range(tid, rows * columns, THREADS):
            r, c = place // columns, place % columns
            if (m_own + r < bias.Sq) & (n_own + c < bias.Sk):
                total, rest = num.zero, num.zero
                for row in range(r, config.rows if one_row else r + 1):
                    for column in range(c, config.columns if one_column else c + 1):
                        total, rest = num.add_compensated(total, rest, smem[of.tile.d_scores.place(row, column)])
                strides = dbias.strides
                at = i64(b_own) * strides[0] + i64(h_own) * strides[1]
                mem.store(dbias.data, at + i64(m_own + r) * strides[2] + i64(n_own + c) * strides[3], total)

    return flash_attention_dbias


@builds
def build_dsinks(variant: Variant, sinks_dtype: str) -> Kernel:
    """flash_attention_dsinks(dsinks, sinks, lse, delta, ends, B, S).

    ends: of varlen, cu_seqlens of B sequences; tokens beyond the last one do not count.
    """
    mem, sinks_mem = storage(variant.dtype), storage(sinks_dtype)
    num = numbers(mem.number)
    STEPS, VARLEN = THREADS.bit_length() - 1, variant.varlen

    @kernel(
        *[strided(sinks_dtype, 1)] * 2, *[statistic_type(variant)] * 2, strided("int32", 1), i32, i32, threads=THREADS
    )
    def flash_attention_dsinks(dsinks, sinks, lse, delta, ends, B, S):
        parts = cuda.shared.array(THREADS, mem.number)
        tid, h = cuda.threadIdx.x, i64(cuda.blockIdx.x)
        sink = mem.number(sinks_mem.load(sinks.data, h * sinks.strides[0]))
        total, rest = num.zero, num.zero
        if VARLEN:
            B, S = i32(1), i32(boundary(ends, B))
        for b in range(B):
            for m in range(tid, S, THREADS):
                share = num.exp(sink - num.base(lse.data[start(lse, b, h, m)]))
                total, rest = num.add_compensated(total, rest, share * delta.data[start(delta, b, h, m)])
        parts[tid] = total
        for step in range(STEPS):
            cuda.syncthreads()
            half = THREADS >> (step + 1)
            if tid < half:
                parts[tid] += parts[tid + half]
        if tid == 0:
            sinks_mem.store(dsinks.data, h * dsinks.strides[0], -parts[0])

    return flash_attention_dsinks
