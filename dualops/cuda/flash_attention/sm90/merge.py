"""What splits of the keys have found becomes attention: o and lse of each, in their order.

lse = ln(exp(sink) + sum of exp(lse_s)),  o = sum of exp(lse_s - lse) * o_s          a warp a row, a lane has columns
"""

from __future__ import annotations

from ...backend import Kernel, builds, cuda, f32, i32, i64, kernel
from ...tile.numbers import numbers
from ...tile.rows import FULL_WARP, lane_reductions, shfl_idx_f32
from ...tile.storage import storage
from ...views import start
from ..arguments import Variant, array_type, size_types, spans, statistic_type
from ..options import chain_of
from .splits import MOST_SPLITS, PARTS_TYPE, part_start, splits_of

THREADS = 256
WARPS = THREADS // 32
AT_ONCE = 8  # splits of which loads are on their way


@builds
def build_merge(variant: Variant, block_kv: int, with_lse: bool) -> Kernel:
    """flash_attention_merge(o, lse, o_parts, lse_parts, rows, H, group, Sq, Sk, aligned, scale, lengths, options)."""
    mem, num, lanes = storage(variant.dtype), numbers(f32), lane_reductions(f32, 32)
    split, span, chain = splits_of(block_kv), spans(variant.varlen), chain_of(variant.having, variant.dtype)
    COLUMNS, OF_LANE = -(-variant.Dv // 32), MOST_SPLITS // 32

    @kernel(
        array_type(variant),
        statistic_type(variant),
        PARTS_TYPE,
        PARTS_TYPE,
        i32,
        *size_types(variant),
        threads=THREADS,
    )
    def flash_attention_merge(o, lse, o_parts, lse_parts, rows, H, group, Sq, Sk, aligned, scale, lengths, options):
        lane, row = i32(cuda.threadIdx.x % 32), i32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        head, i = i32(row // Sq), i32(row % Sq)
        b, h = i32(head // H), i32(head % H)
        if row >= rows:
            return
        q_first, _, Sq, Sk = span.of_batch(lengths, b, Sq, Sk)
        if i >= Sq:
            return
        token, count = i64(q_first + i), split.count(Sk)
        at, step = part_start(lse_parts, 0, b, h, token), lse_parts.strides[0]
        found = cuda.local.array(OF_LANE, f32)  # lse of splits lane, lane + 32, ...
        sink = chain.sink(options, i64(h))
        most = sink
        for n in range(OF_LANE):
            found[n] = num.minus_inf
            if lane + 32 * n < count:
                found[n] = lse_parts.data[at + (lane + 32 * n) * step]
            most = num.maximum(most, found[n])
        most = lanes.max(most)
        base = num.base(most)
        total = num.zero
        for n in range(OF_LANE):
            found[n] = num.exp(found[n] - base)
            total += found[n]
        total = lanes.sum(total) + num.exp(sink - base)
        inverse = num.one / total if total != num.zero else num.zero

        acc = cuda.local.array(COLUMNS, f32)
        for c in range(COLUMNS):
            acc[c] = num.zero
        at, step = part_start(o_parts, 0, b, h, token), o_parts.strides[0]
        values = cuda.local.array(AT_ONCE * COLUMNS, f32)
        for first in range(0, count, AT_ONCE):
            for n in range(AT_ONCE):
                for c in range(COLUMNS):
                    values[n * COLUMNS + c] = num.zero
                    if (first + n < count) & (32 * c + lane < variant.Dv):
                        values[n * COLUMNS + c] = o_parts.data[at + (first + n) * step + 32 * c + lane]
            for n in range(AT_ONCE):
                mine = found[0]
                for k in range(1, OF_LANE):
                    mine = found[k] if first // 32 == k else mine
                weight = shfl_idx_f32(mine, i32((first + n) % 32), FULL_WARP)
                for c in range(COLUMNS):
                    acc[c] += weight * values[n * COLUMNS + c]
        o_row = start(o, b, h, token)
        for c in range(COLUMNS):
            if 32 * c + lane < variant.Dv:
                mem.store(o.data, o_row + 32 * c + lane, acc[c] * inverse)
        if with_lse and lane == 0:
            lse.data[start(lse, b, h, token)] = base + num.log(total)

    return flash_attention_merge
