"""What splits of the keys have found becomes attention: o and lse of each, in their order (`split_kv_sums`). A warp has
a row, a lane of it columns, and of every 32nd split the shares.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, i64, kernel
from ...launch.views import start
from ...tile.numbers import numbers
from ...tile.rows import FULL_WARP, shfl_idx_f32
from ...tile.storage import storage
from ..arguments import Variant, array_type, spans, statistic_type
from ..options import chain_of
from .arguments import tiled_work_type
from .split_kv import MOST_SPLITS, PARTS_TYPE, part_start, splits_of
from .split_kv_sums import inverse_of, join, lse_of, shares_of, total_of

THREADS = 256
WARPS = THREADS // 32
AT_ONCE = 8  # splits of which loads are on their way


@builds
def build_merge(variant: Variant, block_kv: int, with_lse: bool) -> Kernel:
    """flash_attention_merge(o, lse, o_parts, lse_parts, rows, work). work: `Work`. rows: of all heads and batches."""
    mem, num = storage(variant.dtype), numbers(f32)
    split, span, chain = splits_of(block_kv), spans(variant.varlen), chain_of(variant.having, variant.dtype)
    COLUMNS, OF_LANE = -(-variant.Dv // 32), MOST_SPLITS // 32

    @kernel(
        array_type(variant),
        statistic_type(variant),
        *[PARTS_TYPE] * 2,
        i32,
        tiled_work_type(variant),
        threads=THREADS,
    )
    def flash_attention_merge(o, lse, o_parts, lse_parts, rows, work):
        extent, options = work.extent, work.options
        lane, row = i32(cuda.threadIdx.x % 32), i32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        head, i = i32(row // extent.Sq), i32(row % extent.Sq)
        b, h = i32(head // extent.H), i32(head % extent.H)
        if row >= rows:
            return
        q_first, _, Sq, Sk = span.of_batch(work.lengths, b, extent.Sq, extent.Sk)
        if i >= Sq:
            return
        token, count = i64(q_first + i), split.count(Sk)
        at, step = part_start(lse_parts, 0, b, h, token), lse_parts.strides[0]
        shares = cuda.local.array(OF_LANE, f32)  # of splits lane, lane + 32, ...
        weights = cuda.local.array(OF_LANE, f32)
        most = chain.sink(options, i64(h))
        total = total_of(most)
        for n in range(OF_LANE):
            found, rest = num.minus_inf, num.zero
            if lane + 32 * n < count:
                part = at + (lane + 32 * n) * step
                found, rest = lse_parts.data[part], lse_parts.data[part + 1]
            upto = num.maximum(most, found)
            for bit in range(5):
                upto = num.maximum(upto, shfl_idx_f32(upto, max(i32(lane - (1 << bit)), i32(0)), FULL_WARP))
            before = shfl_idx_f32(upto, max(i32(lane - 1), i32(0)), FULL_WARP)
            shares[n], weights[n] = shares_of(before if lane > 0 else most, upto, found, rest)
            most = shfl_idx_f32(upto, 31, FULL_WARP)

        acc = cuda.local.array(COLUMNS, f32)
        for c in range(COLUMNS):
            acc[c] = num.zero
        at, step = part_start(o_parts, 0, b, h, token), o_parts.strides[0]
        values = cuda.local.array(AT_ONCE * COLUMNS, f32)
        for first in range(0, count, AT_ONCE):
            for n in range(AT_ONCE):
                for c in range(COLUMNS):
                    values[n * COLUMNS + c] = num.minus_zero  # of none, whose share is 0, and the others' 1
                    if (first + n < count) & (32 * c + lane < variant.Dv):
                        values[n * COLUMNS + c] = o_parts.data[at + (first + n) * step + 32 * c + lane]
            for n in range(AT_ONCE):
                share, weight = shares[0], weights[0]
                for k in range(1, OF_LANE):
                    share, weight = (shares[k], weights[k]) if first // 32 == k else (share, weight)
                share = shfl_idx_f32(share, i32((first + n) % 32), FULL_WARP)
                weight = shfl_idx_f32(weight, i32((first + n) % 32), FULL_WARP)
                total = join(total, share, weight, num.one)
                for c in range(COLUMNS):
                    acc[c] = join(acc[c], share, weight, values[n * COLUMNS + c])
        o_row, inverse = start(o, b, h, token), inverse_of(total)
        for c in range(COLUMNS):
            if 32 * c + lane < variant.Dv:
                mem.store(o.data, o_row + 32 * c + lane, acc[c] * inverse)
        if with_lse and lane == 0:
            lse.data[start(lse, b, h, token)] = lse_of(most, total)

    return flash_attention_merge
