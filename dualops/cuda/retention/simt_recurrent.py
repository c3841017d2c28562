"""One token of retention, with the state in registers: a decode step. Sun et al. 2023, arXiv:2307.08621, equation 6.

A block of 16 x 16 threads has BLOCK_V columns of a head's state [D, Dv].

    1  state = gamma * state + k^T v
    2  out = scale * q @ state / n                 summed over the 16 lines

gamma is the head's, or exp(log_decay). There is no workspace and one launch. It reads the state once and writes it
once. All loads start before the first wait: those of the state, then those of q, k and v.

Thread (line, lane) of 16 x 16 has the rows line, line + 16, ... and `columns` numbers of each. If states are aligned,
they are neighbours that fill 16 bytes, in each of 16 such groups, so that one access moves them. Otherwise they are the
columns lane, lane + 16, ... The rows of a thread and the order of all sums are the same in both cases. Thread d also
has number d of the norm.

A predicated load returns 0 for numbers beyond the state. Numbers beyond a row are replaced by 0 after a load of the
row's last number. Neither is a branch: a branch would wait for a load before the next one starts.

Shared memory: itemsize * (2 * D16 + 17 * BLOCK_V + 8), with D rounded up to 16 (D16). Registers: state_rows * columns
numbers and about 30 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, u32, verb
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, neighbours, opaque_i32
from ..tile.rows import lane_reductions
from ..tile.shared import Shared, Tile
from ..tile.storage import access, storage
from .arguments import Variant, call_type, inputs_type, state_type
from .decays import decay as decay_of_head, exp_of_step

WARPS = THREADS // 32


class RecurrentLayout(NamedTuple):
    """What is in shared memory. D16: D rounded up to 16."""

    q: int  # [D16]
    k: int  # [D16]
    v: int  # [BLOCK_V]
    parts: Tile  # [LANES, BLOCK_V]: each line's share of the result
    norm_parts: int  # each warp's share of the row sum
    nbytes: int


@dataclass(frozen=True)
class RecurrentConfig:
    """A thread's part of the state: state_rows x columns."""

    state_rows: int
    columns: int
    min_blocks: int = 1  # on an SM

    @cached_property
    def block_v(self) -> int:
        return LANES * self.columns

    def layout(self, dtype: str) -> RecurrentLayout:
        shared = Shared(dtype, THREADS)
        q, k, v = (shared.vector(count) for count in (*[LANES * self.state_rows] * 2, self.block_v))
        parts = shared.tile(LANES, self.block_v, pad=0)
        return RecurrentLayout(q, k, v, parts, shared.vector(WARPS), shared.nbytes)

    def shared_bytes(self, dtype: str, D: int) -> int:
        """Return the shared memory. D: at most LANES * state_rows, for which there is room."""
        return self.layout(dtype).nbytes


@builds
def build_recurrent(config: RecurrentConfig, variant: Variant) -> Kernel:
    """retention_recurrent(out, row_sum, x, ends, norm_ends, decay, call).

    ends, norm_ends: the states and their norms at both ends. decay: gamma, or log_decay. If the variant is aligned, the
    rows of the states are whole 16-byte vectors, and so is `columns`.
    """
    dtype, exp_of, own = variant.dtype, exp_of_step(variant.dtype), decay_of_head(variant.dtype)
    mem, num, tile = storage(dtype), numbers(storage(dtype).number), config.layout(dtype)
    vec, lanes = access(compute_dtype(dtype), variant.aligned, once=True), lane_reductions(mem.number, 32)
    ROWS, COLUMNS, NEAR, D16 = config.state_rows, config.columns, vec.vector, LANES * config.state_rows
    row_of = neighbours(mem.number, NEAR)

    @verb
    def my_column(c):
        """Return the column of my column number c."""
        return (c // NEAR * LANES + i32(u32(cuda.threadIdx.x) % u32(LANES))) * NEAR + c % NEAR

    @verb
    def move(state, x, b, h, e0, limits, loads):
        """Load my part of the columns from e0 on of x [B, H, D, Dv], zeros beyond its limits, or store it."""
        line = i32(u32(cuda.threadIdx.x) // u32(LANES))
        at = start(x, b, h, line)
        for i in range(ROWS):
            for c in range(0, COLUMNS, NEAR):
                there = (i32(line + LANES * i) < i32(limits[0])) & (i32(e0 + my_column(c)) < i32(limits[1]))
                place = at + (e0 + my_column(c)) * (i64(1) if variant.aligned else x.strides[3])
                if loads:
                    vec.load(state, i * COLUMNS + c, x.data, place, there, num.zero)
                else:
                    vec.store(x.data, place, there, state, i * COLUMNS + c)
            at += LANES * x.strides[2]

    @kernel(
        strided(dtype, 3),
        number_type(dtype, 3),
        inputs_type(dtype),
        *[state_type(dtype, rank) for rank in (4, 3)],
        number_type(dtype, 3 if variant.stepwise else 1),
        call_type(dtype),
        threads=THREADS,
        min_blocks=config.min_blocks,
    )
    def retention_recurrent(out, row_sum, x, ends, norm_ends, decay, call):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid, line = i32(cuda.threadIdx.x), i32(u32(cuda.threadIdx.x) // u32(LANES))
        block, v_blocks = u32(cuda.blockIdx.x), u32(call.Dv + config.block_v - 1) // u32(config.block_v)
        head, e0 = block // v_blocks, i32(block % v_blocks * u32(config.block_v))
        b, h = i64(head // u32(call.H)), i64(head % u32(call.H))

        state = cuda.local.array(ROWS * COLUMNS, mem.number)
        part, value = cuda.local.array(COLUMNS, mem.number), cuda.local.array(COLUMNS, mem.number)
        move(state, ends.initial, b, h, e0, (call.D if ends.begins != 0 else 0, call.Dv), True)
        factor = num.one  # of the state: loads start here, and are waited for where it is computed
        if variant.stepwise:
            factor = decay.data[start(decay, b, h, 0)]
        elif call.has_gamma != 0:
            factor = decay.data[h * decay.strides[0]]
        d, e = min(tid, i32(call.D - 1)), min(i32(e0 + tid), i32(call.Dv - 1))
        query, key = mem.load(x.q.data, start(x.q, b, h, 0) + d), mem.load(x.k.data, start(x.k, b, h, 0) + d)
        mine = mem.load(x.v.data, start(x.v, b, h, 0) + e)
        if tid < D16:
            smem[u32(tile.q + tid)] = query if tid < call.D else num.zero
            smem[u32(tile.k + tid)] = key if tid < call.D else num.zero
        if tid < config.block_v:
            smem[u32(tile.v + tid)] = mine if e0 + tid < call.Dv else num.zero
        if variant.stepwise:
            factor = exp_of(factor)
        elif call.has_gamma == 0:
            factor = num.one + own.less_than_one(h)
        cuda.syncthreads()

        for c in range(0, COLUMNS, NEAR):
            row_of.load(value, c, smem, u32(tile.v + my_column(c)))
        for c in range(COLUMNS):
            part[c] = num.zero
        q_at, k_at = u32(opaque_i32(tile.q + line)), u32(opaque_i32(tile.k + line))
        for i in range(ROWS):
            query_of, key_of = smem[q_at + u32(LANES * i)], smem[k_at + u32(LANES * i)]
            for c in range(COLUMNS):
                state[i * COLUMNS + c] = state[i * COLUMNS + c] * factor + key_of * value[c]
                part[c] += query_of * state[i * COLUMNS + c]
        for c in range(COLUMNS):
            smem[u32(tile.parts.place(line, my_column(c)))] = part[c]
        norm = num.zero
        if variant.normalized:
            share = num.zero
            if tid < call.D:
                if norm_ends.begins != 0:
                    norm = norm_ends.initial.data[start(norm_ends.initial, b, h, tid)] * factor
                norm += smem[u32(tile.k + tid)]
                share = norm * smem[u32(tile.q + tid)]
            share = lanes.sum(share)
            if tid % 32 == 0:
                smem[u32(tile.norm_parts + tid // 32)] = share
        cuda.syncthreads()

        move(state, ends.final, b, h, e0, (call.D if ends.finishes != 0 else 0, call.Dv), False)
        if (tid < config.block_v) & (e0 + tid < call.Dv):
            total, row_total, size = num.zero, num.zero, num.one
            for i in range(LANES):
                total += smem[u32(tile.parts.place(i, tid))]
            if variant.normalized:
                for i in range(WARPS):
                    row_total += smem[u32(tile.norm_parts + i)]
                row_total *= call.state_scale
                if not abs(row_total) <= num.one:  # a NaN too
                    size = abs(row_total)
                if (call.sums != 0) & (e0 + tid == 0):
                    row_sum.data[start(row_sum, b, h, 0)] = row_total
            mem.store(out.data, start(out, b, h, 0) + e0 + tid, total * call.state_scale / size)
        if variant.normalized and (norm_ends.finishes != 0) & (e0 == 0) & (tid < call.D):
            norm_ends.final.data[start(norm_ends.final, b, h, tid)] = norm

    return retention_recurrent
