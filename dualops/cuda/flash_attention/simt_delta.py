"""delta of attention's gradient, a number a query, before the tiles.

delta = rowsum(do * o) - dlse                     16 lanes a row
"""

from __future__ import annotations

from ..backend import Kernel, builds, cuda, i32, i64, kernel
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from ..views import start
from .arguments import Variant, array_type, statistic_type

ROWS = THREADS // LANES  # of a block


@builds
def build_delta(variant: Variant, with_dlse: bool) -> Kernel:
    """flash_attention_delta(delta, o, do, dlse, H, S, Dv): of all tokens, in whatever sequence."""
    mem = storage(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, LANES)

    @kernel(statistic_type(variant), *[array_type(variant)] * 2, statistic_type(variant), *[i32] * 3, threads=THREADS)
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
            if with_dlse:
                total -= dlse.data[start(dlse, b, h, m)]
            delta.data[start(delta, b, h, m)] = total

    return flash_attention_delta
