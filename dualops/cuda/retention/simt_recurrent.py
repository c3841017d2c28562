"""Retention token after token, with the state in registers. Sun et al. 2023, arXiv:2307.08621, equation 6.

A block of 16 x 16 threads takes BLOCK_V columns of a head's state [D, Dv], a thread (line, lane) its rows line,
line + 16, ... and of them the columns lane, lane + 16, ...

    1  for each token:    state = gamma * state + kept_scale * k^T v        (the first of a pass back: without gamma)
    2                     out = state_scale * q @ state / n                 16 lines meet for a sum

Tokens come STEPS_AT_ONCE at a time, so that the lines meet but twice for so many. Nothing but the state is kept: no
workspace, and one launch, which for a single token reads the state once and writes it once.

Shared memory: itemsize * STEPS_AT_ONCE * (2 * D16 + 17 * BLOCK_V + 18), D16 being D rounded up to 16.
Registers: state_rows * (columns + 1) numbers and about 40 more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backend import Kernel, builds, cuda, i64, kernel
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.storage import storage
from ..views import number_type, start, strided
from .arguments import OF_COLUMNS, OF_ROWS, call_type, decay, origin, span

STEPS_AT_ONCE = 8


@dataclass(frozen=True)
class RecurrentConfig:
    """What a thread holds of the state: state_rows x columns."""

    state_rows: int
    columns: int

    @property
    def block_v(self) -> int:
        return LANES * self.columns

    def shared_bytes(self, dtype: str, D: int) -> int:
        """D: at most LANES * state_rows, which is what room is made for."""
        count = STEPS_AT_ONCE * (2 * LANES * self.state_rows + (LANES + 1) * self.block_v + LANES + 2)
        return count * (8 if dtype == "float64" else 4)


@builds
def build_recurrent(config: RecurrentConfig, dtype: str) -> Kernel:
    """retention_recurrent(out, row_sum, q, k, v, initial, final, initial_norm, final_norm, weights, terms, gamma, ends,
    call, begins, finishes, norm_begins, norm_finishes): the last four say which of the states are there."""
    mem, decays = storage(dtype), decay(dtype)
    num = numbers(mem.number)
    ROWS, COLUMNS, BLOCK_V = config.state_rows, config.columns, config.block_v
    WIDTH = LANES * ROWS
    Q, K, V = 0, STEPS_AT_ONCE * WIDTH, 2 * STEPS_AT_ONCE * WIDTH
    PARTS = V + STEPS_AT_ONCE * BLOCK_V
    NORM_PARTS = PARTS + STEPS_AT_ONCE * LANES * BLOCK_V
    ROW_TERMS = NORM_PARTS + STEPS_AT_ONCE * LANES
    COLUMN_TERMS = ROW_TERMS + STEPS_AT_ONCE
    N_STATE, N_NORM = ROWS * COLUMNS, max(ROWS, COLUMNS)

    @kernel(
        strided(dtype, 3),
        number_type(dtype, 3),
        *[strided(dtype, 3)] * 3,
        *[number_type(dtype, 4)] * 2,
        *[number_type(dtype, 3)] * 4,
        number_type(dtype, 1),
        strided("int32", 1),
        call_type(dtype),
        *[i64] * 4,
        threads=THREADS,
    )
    def retention_recurrent(
        out,
        row_sum,
        q,
        k,
        v,
        initial,
        final,
        initial_norm,
        final_norm,
        weights,
        terms,
        gamma,
        ends,
        call,
        begins,
        finishes,
        norm_begins,
        norm_finishes,
    ):
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % LANES, tid // LANES
        v_blocks = (call.Dv + BLOCK_V - 1) // BLOCK_V
        head, e0 = i64(cuda.blockIdx.x) // v_blocks, i64(cuda.blockIdx.x) % v_blocks * BLOCK_V
        b, h = head // call.H, head % call.H
        first, count, _ = span(ends, call, b)
        token0 = origin(call, first, count)
        my_gamma = decays.value(gamma, call, h)
        e_mine = e0 + lane  # my first column

        state = cuda.local.array(N_STATE, mem.number)
        norm = cuda.local.array(N_NORM, mem.number)  # of my rows; in the gradient of my columns
        part = cuda.local.array(COLUMNS, mem.number)
        value = cuda.local.array(COLUMNS, mem.number)
        for i in range(ROWS):
            for c in range(COLUMNS):
                d, e = line + LANES * i, e_mine + LANES * c
                state[i * COLUMNS + c] = num.zero
                if (begins != 0) & (d < call.D) & (e < call.Dv):
                    at = b * initial.strides[0] + h * initial.strides[1]
                    state[i * COLUMNS + c] = initial.data[at + d * initial.strides[2] + e * initial.strides[3]]
        for i in range(N_NORM):
            norm[i] = num.zero
            at, width = line + LANES * i, call.D
            if call.normed == OF_COLUMNS:
                at, width = e_mine + LANES * i, call.Dv
            if (norm_begins != 0) & (at < width):
                norm[i] = initial_norm.data[start(initial_norm, b, h, at)]

        for t0 in range(0, count, STEPS_AT_ONCE):
            cuda.syncthreads()
            steps = min(count - t0, STEPS_AT_ONCE)
            for at in range(tid, steps * WIDTH, THREADS):
                token, d = token0 + call.direction * (t0 + at // WIDTH), at % WIDTH
                smem[Q + at] = num.zero
                smem[K + at] = num.zero
                if d < call.D:
                    smem[Q + at] = mem.load(q.data, start(q, b, h, token) + d)
                    smem[K + at] = mem.load(k.data, start(k, b, h, token) + d)
            for at in range(tid, steps * BLOCK_V, THREADS):
                token, e = token0 + call.direction * (t0 + at // BLOCK_V), e0 + at % BLOCK_V
                kept = num.zero
                if e < call.Dv:
                    kept = mem.load(v.data, start(v, b, h, token) + e) * call.kept_scale
                    if call.column_weighted != 0:
                        kept *= weights.data[start(weights, b, h, token)]
                smem[V + at] = kept
            if tid < steps:
                token = token0 + call.direction * (t0 + tid)
                smem[ROW_TERMS + tid] = num.one
                smem[COLUMN_TERMS + tid] = num.one
                if call.row_term != 0:
                    smem[ROW_TERMS + tid] = terms.data[start(terms, b, h, token)]
                if call.column_term != 0:
                    smem[COLUMN_TERMS + tid] = terms.data[start(terms, b, h, token)]
            cuda.syncthreads()

            for t in range(steps):
                factor = my_gamma
                if (t0 + t == 0) & (call.later == 0):
                    factor = num.one
                for c in range(COLUMNS):
                    part[c] = num.zero
                    value[c] = smem[V + t * BLOCK_V + lane + LANES * c]
                norm_part = num.zero
                for i in range(ROWS):
                    d = line + LANES * i
                    query, key = smem[Q + t * WIDTH + d], smem[K + t * WIDTH + d]
                    for c in range(COLUMNS):
                        state[i * COLUMNS + c] = state[i * COLUMNS + c] * factor + key * value[c]
                        part[c] += query * state[i * COLUMNS + c]
                    if call.normed == OF_ROWS:
                        norm[i] = norm[i] * factor + key
                        norm_part += query * norm[i]
                if call.normed == OF_COLUMNS:
                    for c in range(COLUMNS):
                        term = smem[COLUMN_TERMS + t]
                        norm[c] = norm[c] * factor + (term * value[c] if term != num.zero else num.zero)
                        if line == 0:
                            part[c] += smem[ROW_TERMS + t] * norm[c]
                for c in range(COLUMNS):
                    smem[PARTS + (t * LANES + line) * BLOCK_V + lane + LANES * c] = part[c]
                if lane == 0:
                    smem[NORM_PARTS + t * LANES + line] = norm_part
            cuda.syncthreads()

            for at in range(tid, steps * BLOCK_V, THREADS):
                t, e = at // BLOCK_V, e0 + at % BLOCK_V
                token = token0 + call.direction * (t0 + t)
                total, size = num.zero, num.one
                for i in range(LANES):
                    total += smem[PARTS + (t * LANES + i) * BLOCK_V + at % BLOCK_V]
                total *= call.state_scale
                if call.normed == OF_ROWS:
                    norm_total = num.zero
                    for i in range(LANES):
                        norm_total += smem[NORM_PARTS + t * LANES + i]
                    norm_total *= call.state_scale
                    if not abs(norm_total) <= num.one:  # a NaN too
                        size = abs(norm_total)
                    if (call.sums != 0) & (e == 0):
                        row_sum.data[start(row_sum, b, h, token)] = norm_total
                    total /= size
                if call.row_weighted != 0:
                    total *= weights.data[start(weights, b, h, token)]
                if e < call.Dv:
                    mem.store(out.data, start(out, b, h, token) + e, total)

        last = num.one  # a pass back ends before its last token, which is the first one
        if (call.later == 0) & (count > 0):
            last = my_gamma
        for i in range(ROWS):
            for c in range(COLUMNS):
                d, e = line + LANES * i, e_mine + LANES * c
                if (finishes != 0) & (d < call.D) & (e < call.Dv):
                    at = b * final.strides[0] + h * final.strides[1]
                    final.data[at + d * final.strides[2] + e * final.strides[3]] = state[i * COLUMNS + c] * last
        for i in range(N_NORM):
            at, width, writer = line + LANES * i, call.D, (lane == 0) & (e0 == 0)
            if call.normed == OF_COLUMNS:
                at, width, writer = e_mine + LANES * i, call.Dv, (line == 0) & (i < COLUMNS)
            if (norm_finishes != 0) & writer & (at < width):
                final_norm.data[start(final_norm, b, h, at)] = norm[i] * last

    return retention_recurrent
