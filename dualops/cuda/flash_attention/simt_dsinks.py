"""dsinks of attention's gradient, after delta; compensated sums (Kahan), then a tree.

dsinks_h = -sum(exp(sink_h - lse) * delta)        a block a head
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.views import boundary, start, strided
from ..tile.numbers import numbers
from ..tile.products import THREADS
from ..tile.storage import storage
from .arguments import Variant, statistic_type


@builds
def build_dsinks(variant: Variant, sinks_dtype: str) -> Kernel:
    """flash_attention_dsinks(dsinks, sinks, lse, delta, ends, B, S).

    ends: of varlen cu_seqlens, of B sequences; of all S tokens those count that belong to one.
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
