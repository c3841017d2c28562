"""Retention token after token, with the state in registers. Sun et al. 2023, arXiv:2307.08621, equation 6.

A block of 16 x 16 threads takes BLOCK_V columns of a head's state [D, Dv], a thread (line, lane) its rows line,
line + 16, ... and of them the columns lane, lane + 16, ...

    1  for each token:    state = gamma * state + kept_scale * k^T v        (the first of a pass back: without gamma)
    2                     out = state_scale * q @ state / n                 16 lines meet for a sum

gamma is the head's, or exp(log_decay) of the token, in a pass back of the one before it in the pass.

Tokens come STEPS_AT_ONCE at a time, so that the lines meet but twice for so many. Nothing but the state is kept: no
workspace, and one launch, which for a single token reads the state once and writes it once.

Shared memory: itemsize * STEPS_AT_ONCE * (2 * D16 + 17 * BLOCK_V + 19), D16 being D rounded up to 16.
Registers: state_rows * (columns + 1) numbers and about 40 more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..backend import Kernel, Namespace, builds, cuda, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS
from ..tile.shared import Shared, Tile
from ..tile.storage import storage
from ..views import number_type, start, strided
from .arguments import OF_COLUMNS, OF_ROWS, call_type, decay, origin, span
from .decays import exp_of_step

STEPS_AT_ONCE = 8


class RecurrentLayout(NamedTuple):
    """What lies in shared memory, of STEPS_AT_ONCE tokens; D16: D rounded up to 16."""

    q: Tile  # [STEPS_AT_ONCE, D16]
    k: Tile  # [STEPS_AT_ONCE, D16]
    v: Tile  # [STEPS_AT_ONCE, BLOCK_V]
    parts: Tile  # [STEPS_AT_ONCE * LANES, BLOCK_V]: of a token's result each line has a share
    norm_parts: Tile  # [STEPS_AT_ONCE, LANES]: and of its sum
    row_terms: int  # of the tokens
    column_terms: int
    factors: int  # what the state is multiplied by, where it is not the same for all
    nbytes: int


@dataclass(frozen=True)
class RecurrentConfig:
    """What a thread holds of the state: state_rows x columns."""

    state_rows: int
    columns: int

    @cached_property
    def block_v(self) -> int:
        return LANES * self.columns

    def layout(self, dtype: str) -> RecurrentLayout:
        shared = Shared(dtype, THREADS)
        q, k = (shared.tile(STEPS_AT_ONCE, LANES * self.state_rows, pad=0) for _ in range(2))
        v = shared.tile(STEPS_AT_ONCE, self.block_v, pad=0)
        parts = shared.tile(STEPS_AT_ONCE * LANES, self.block_v, pad=0)
        norm_parts = shared.tile(STEPS_AT_ONCE, LANES, pad=0)
        row_terms, column_terms, factors = (shared.vector(STEPS_AT_ONCE) for _ in range(3))
        return RecurrentLayout(q, k, v, parts, norm_parts, row_terms, column_terms, factors, shared.nbytes)

    def shared_bytes(self, dtype: str, D: int) -> int:
        """D: at most LANES * state_rows, which is what room is made for."""
        return self.layout(dtype).nbytes


class Held(Namespace):
    """What thread (line, lane) holds of a state [D, BLOCK_V], and of a norm: numbers of its rows, or of its columns."""

    rows: int
    columns: int
    norms: int  # numbers of a norm: as many as rows, or as columns
    row: Callable[..., Any]  # (i) -> which row number i is
    column: Callable[..., Any]  # (c) -> which column number c is
    state: Callable[..., Any]  # () -> a local array of rows x columns
    norm: Callable[..., Any]  # () -> a local array
    of_columns: Callable[..., Any]  # () -> a local array with a number for each column


def _held(number: Any, rows: int, columns: int) -> Held:
    norms = max(rows, columns)

    @verb
    def row(i):
        return cuda.threadIdx.x // LANES + LANES * i

    @verb
    def column(c):
        return cuda.threadIdx.x % LANES + LANES * c

    @verb
    def state():
        return cuda.local.array(rows * columns, number)

    @verb
    def norm():
        return cuda.local.array(norms, number)

    @verb
    def of_columns():
        return cuda.local.array(columns, number)

    return Held(
        rows=rows, columns=columns, norms=norms, row=row, column=column, state=state, norm=norm, of_columns=of_columns
    )


@builds
def build_recurrent(config: RecurrentConfig, dtype: str, *, stepwise: bool = False) -> Kernel:
    """retention_recurrent(out, row_sum, q, k, v, initial, final, initial_norm, final_norm, weights, terms, decay, ends,
    call, begins, finishes, norm_begins, norm_finishes): the last four say which of the states are there. decay: gamma,
    or log_decay."""
    mem, decays, exp_of = storage(dtype), decay(dtype), exp_of_step(dtype)
    num, tile = numbers(mem.number), config.layout(dtype)
    held = _held(mem.number, config.state_rows, config.columns)

    @kernel(
        strided(dtype, 3),
        number_type(dtype, 3),
        *[strided(dtype, 3)] * 3,
        *[number_type(dtype, 4)] * 2,
        *[number_type(dtype, 3)] * 4,
        number_type(dtype, 3 if stepwise else 1),
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
        decay,
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
        v_blocks = (call.Dv + config.block_v - 1) // config.block_v
        head, e0 = i64(cuda.blockIdx.x) // v_blocks, i64(cuda.blockIdx.x) % v_blocks * config.block_v
        b, h = head // call.H, head % call.H
        first, count, _ = span(ends, call, b)
        token0 = origin(call, first, count)
        my_gamma = num.one
        if not stepwise:
            my_gamma = decays.value(decay, call, h)

        state, norm = held.state(), held.norm()  # the norm: of my rows; in the gradient of my columns
        part, value = held.of_columns(), held.of_columns()
        for i in range(held.rows):
            for c in range(held.columns):
                d, e = held.row(i), e0 + held.column(c)
                state[i * held.columns + c] = num.zero
                if (begins != 0) & (d < call.D) & (e < call.Dv):
                    at = b * initial.strides[0] + h * initial.strides[1]
                    state[i * held.columns + c] = initial.data[at + d * initial.strides[2] + e * initial.strides[3]]
        for i in range(held.norms):
            norm[i] = num.zero
            at, width = held.row(i), call.D
            if call.normed == OF_COLUMNS:
                at, width = e0 + held.column(i), call.Dv
            if (norm_begins != 0) & (at < width):
                norm[i] = initial_norm.data[start(initial_norm, b, h, at)]

        for t0 in range(0, count, STEPS_AT_ONCE):
            cuda.syncthreads()
            steps = min(count - t0, STEPS_AT_ONCE)
            for at in range(tid, steps * tile.q.width, THREADS):
                token, d = token0 + call.direction * (t0 + at // tile.q.width), at % tile.q.width
                smem[tile.q.at + at] = num.zero
                smem[tile.k.at + at] = num.zero
                if d < call.D:
                    smem[tile.q.at + at] = mem.load(q.data, start(q, b, h, token) + d)
                    smem[tile.k.at + at] = mem.load(k.data, start(k, b, h, token) + d)
            for at in range(tid, steps * config.block_v, THREADS):
                token, e = token0 + call.direction * (t0 + at // config.block_v), e0 + at % config.block_v
                kept = num.zero
                if e < call.Dv:
                    kept = mem.load(v.data, start(v, b, h, token) + e) * call.kept_scale
                    if call.column_weighted != 0:
                        kept *= weights.data[start(weights, b, h, token)]
                smem[tile.v.at + at] = kept
            if tid < steps:
                token = token0 + call.direction * (t0 + tid)
                smem[tile.row_terms + tid] = num.one
                smem[tile.column_terms + tid] = num.one
                if call.row_term != 0:
                    smem[tile.row_terms + tid] = terms.data[start(terms, b, h, token)]
                if call.column_term != 0:
                    smem[tile.column_terms + tid] = terms.data[start(terms, b, h, token)]
                if stepwise:
                    token -= call.direction * (1 - call.later)  # the one whose step leads here
                    smem[tile.factors + tid] = num.one
                    if t0 + tid + call.later > 0:
                        smem[tile.factors + tid] = exp_of(decay.data[start(decay, b, h, token)])
            cuda.syncthreads()

            for t in range(steps):
                factor = my_gamma
                if stepwise:
                    factor = smem[tile.factors + t]
                elif (t0 + t == 0) & (call.later == 0):
                    factor = num.one
                for c in range(held.columns):
                    part[c] = num.zero
                    value[c] = smem[tile.v.place(t, held.column(c))]
                norm_part = num.zero
                for i in range(held.rows):
                    query, key = smem[tile.q.place(t, held.row(i))], smem[tile.k.place(t, held.row(i))]
                    for c in range(held.columns):
                        state[i * held.columns + c] = state[i * held.columns + c] * factor + key * value[c]
                        part[c] += query * state[i * held.columns + c]
                    if call.normed == OF_ROWS:
                        norm[i] = norm[i] * factor + key
                        norm_part += query * norm[i]
                if call.normed == OF_COLUMNS:
                    for c in range(held.columns):
                        term = smem[tile.column_terms + t]
                        norm[c] = norm[c] * factor + (term * value[c] if term != num.zero else num.zero)
                        if line == 0:
                            part[c] += smem[tile.row_terms + t] * norm[c]
                for c in range(held.columns):
                    smem[tile.parts.place(t * LANES + line, held.column(c))] = part[c]
                if lane == 0:
                    smem[tile.norm_parts.place(t, line)] = norm_part
            cuda.syncthreads()

            for at in range(tid, steps * config.block_v, THREADS):
                t, e = at // config.block_v, e0 + at % config.block_v
                token = token0 + call.direction * (t0 + t)
                total, size = num.zero, num.one
                for i in range(LANES):
                    total += smem[tile.parts.place(t * LANES + i, at % config.block_v)]
                total *= call.state_scale
                if call.normed == OF_ROWS:
                    norm_total = num.zero
                    for i in range(LANES):
                        norm_total += smem[tile.norm_parts.place(t, i)]
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
            if stepwise:
                last = exp_of(decay.data[start(decay, b, h, first)])
        for i in range(held.rows):
            for c in range(held.columns):
                d, e = held.row(i), e0 + held.column(c)
                if (finishes != 0) & (d < call.D) & (e < call.Dv):
                    at = b * final.strides[0] + h * final.strides[1]
                    final.data[at + d * final.strides[2] + e * final.strides[3]] = state[i * held.columns + c] * last
        for i in range(held.norms):
            at, width, writer = held.row(i), call.D, (lane == 0) & (e0 == 0)
            if call.normed == OF_COLUMNS:
                at, width, writer = e0 + held.column(i), call.Dv, (line == 0) & (i < held.columns)
            if (norm_finishes != 0) & writer & (at < width):
                final_norm.data[start(final_norm, b, h, at)] = norm[i] * last

    return retention_recurrent
