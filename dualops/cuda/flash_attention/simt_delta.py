"""delta of attention's gradient, a number a query, before the tiles.

delta = rowsum(do * o) - dlse                     16 lanes a row, four rows at a time: a block of few would end too soon

Blocks of 128 threads: 34 microseconds for two arrays of 67 MB on an H200, where those of 256 take 43.
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel
from ..launch.views import start
from ..tile.numbers import numbers
from ..tile.products import LANES
from ..tile.rows import lane_reductions
from ..tile.storage import access, storage
from .arguments import Variant, array_type, statistic_type

THREADS, EACH = 128, 4
LINES = THREADS // LANES
ROWS = LINES * EACH  # of a block


@builds
def build_delta(variant: Variant, with_dlse: bool, aligned: bool) -> Kernel:
    """flash_attention_delta(delta, o, do, dlse, H, S, Dv): of all tokens, in whatever sequence.

    aligned: rows of o and do are multiples of 16 bytes, and begin at such.
    """
    mem, source = storage(variant.dtype), access(variant.dtype, aligned, once=True)
    VECTOR, WIDTH = source.vector, LANES * source.vector
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)

    @kernel(statistic_type(variant), *[array_type(variant)] * 2, statistic_type(variant), *[i32] * 3, threads=THREADS)
    def flash_attention_delta(delta, o, do, dlse, H, S, Dv):
        lane, line = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        blocks = (S + ROWS - 1) // ROWS
        head, m0 = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks * ROWS + line
        b, h = i64(head // H), i64(head % H)
        some_o, some_do = cuda.local.array(EACH * VECTOR, mem.number), cuda.local.array(EACH * VECTOR, mem.number)
        totals = cuda.local.array(EACH, mem.number)
        for r in range(EACH):
            totals[r] = num.zero
        for c in range(lane * VECTOR, Dv, WIDTH):
            for r in range(EACH):
                m = m0 + r * LINES
                source.load(some_o, r * VECTOR, o.data, start(o, b, h, m) + c, m < S, num.zero)
                source.load(some_do, r * VECTOR, do.data, start(do, b, h, m) + c, m < S, num.zero)
            for r in range(EACH):
                for e in range(VECTOR):
                    totals[r] += some_o[r * VECTOR + e] * some_do[r * VECTOR + e]
        for r in range(EACH):
            m, total = m0 + r * LINES, lanes.sum(totals[r])
            if (m < S) & (lane == 0):
                if with_dlse:
                    total -= dlse.data[start(dlse, b, h, m)]
                delta.data[start(delta, b, h, m)] = total

    return flash_attention_delta
