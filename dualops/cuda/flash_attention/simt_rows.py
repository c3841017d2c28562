"""The parts of attention's gradient that go by rows: delta before the tiles, dsinks after.

delta = rowsum(do * o) - dlse                     16 lanes a row
dsinks_h = -sum(exp(sink_h - lse) * delta)        a block a head; compensated sums (Kahan), then a tree
"""

from __future__ import annotations

from ..backend import Kernel, builds, cuda, i32, i64, kernel
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .arguments import Variant, array_type, start, statistic_type
from .options import strided

ROWS = THREADS // LANES  # of delta in a block


@builds
def build_delta(variant: Variant, with_dlse: bool) -> Kernel:
    """flash_attention_delta(delta, o, do, dlse, H, S, Dv): of all tokens, in whatever sequence."""
    mem = storage(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)
    WITH_DLSE = with_dlse
    statistic = statistic_type(variant)

    @kernel(statistic, *[array_type(variant)] * 2, statistic, *[i32] * 3, threads=THREADS)
    def flash_attention_delta(delta, o, do, dlse, H, S, Dv):
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        blocks = (S + ROWS - 1) // ROWS
        head, m = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks * ROWS + line
        b, h = i64(head // H), i64(head % H)
        total = num.zero
        if m < S:
            o_row, do_row = start(o, b, h, m), start(do, b, h, m)
            for c in range(lane, Dv, LANES):
                total += mem.load(o.data, o_row + c) * mem.load(do.data, do_row + c)
        total = lanes.sum(total)
        if (m < S) & (lane == 0):
            if WITH_DLSE:
                total -= dlse.data[start(dlse, b, h, m)]
            delta.data[start(delta, b, h, m)] = total

    return flash_attention_delta


@builds
def build_dsinks(variant: Variant, sinks_dtype: str) -> Kernel:
    """flash_attention_dsinks(dsinks, sinks, lse, delta, B, S)."""
    mem, sinks_mem = storage(variant.dtype), storage(sinks_dtype)
    num = numbers(mem.number)
    STEPS = THREADS.bit_length() - 1

    @kernel(*[strided(sinks_dtype, 1)] * 2, *[statistic_type(variant)] * 2, i32, i32, threads=THREADS)
    def flash_attention_dsinks(dsinks, sinks, lse, delta, B, S):
        parts = cuda.shared.array(THREADS, mem.number)
        tid, h = cuda.threadIdx.x, i64(cuda.blockIdx.x)
        sink = mem.number(sinks_mem.load(sinks.data, h * sinks.strides[0]))
        total, rest = num.zero, num.zero
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
