"""Retention token after token, with the state in registers. Sun et al. 2023, arXiv:2307.08621, equation 6.

A block of 16 x 16 threads has BLOCK_V columns of a head's state [D, Dv].

    1  for each token:    state = gamma * state + kept_scale * k^T v        (the first of a pass back: without gamma)
    2                     out = state_scale * q @ state / n                 summed over the 16 lines

gamma is the head's, or exp(log_decay) of the token. A pass back takes that of the token before it in the pass.

Several tokens are loaded at a time, so that the block needs only two barriers for all of them. Only the state is kept:
there is no workspace and one launch. For a single token the launch reads the state once and writes it once. All loads
of the state start before the first wait, then those of the tokens' rows.

Thread (line, lane) of 16 x 16 has the rows line, line + 16, ... and `columns` numbers of each. If states are aligned,
they are neighbours that fill 16 bytes, in each of 16 such groups, so that one access moves them. Otherwise they are the
columns lane, lane + 16, ... The rows of a thread and the order of all sums are the same in both cases.

Tokens' rows, which all threads need, go through shared memory (`fetched`).

A predicated load returns 0 for numbers beyond the state. Numbers beyond a token's row are replaced by 0 after a load of
the row's last number. Neither is a branch: a branch would wait for a load before the next one starts.

Shared memory: itemsize * (tokens * (2 * D16 + 17 * BLOCK_V + 16) + 3 * tokens4), with D rounded up to 16 (D16) and
tokens rounded up to 4 (tokens4). Registers: state_rows * (columns + 1) numbers and about 30 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, u32, verb
from ..launch.arrays import cdiv
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, THREADS, neighbours, opaque_i32
from ..tile.shared import Part, Shared, Tile
from ..tile.storage import access, storage
from ..tile.unrolled import local_array
from .arguments import OF_COLUMNS, OF_ROWS, Variant, call_type, inputs_type, origin, span, state_type
from .decays import step_factors


@noun
def state_registers(dtype: str, rows: int, columns: int, *, aligned: bool) -> Members:
    """A thread's part of a state, and of a norm: numbers of its rows, or of its columns. aligned: the rows of states
    are whole 16-byte vectors, and so is `columns`.
    """
    vec, num = access(compute_dtype(dtype), aligned, once=True), numbers(storage(dtype).number)
    near, row_of = vec.vector, neighbours(storage(dtype).number, vec.vector)

    @verb
    def line():
        """Return my line."""
        return i32(u32(cuda.threadIdx.x) // u32(LANES))

    @verb
    def lane():
        """Return my lane."""
        return i32(u32(cuda.threadIdx.x) % u32(LANES))

    @verb
    def row(i):
        """Return the row of my row number i."""
        return line() + LANES * i

    @verb
    def column(c):
        """Return the column of my column number c."""
        return (c // near * LANES + lane()) * near + c % near

    @verb
    def _move(state, x, b, h, e0, limits, loads):
        at = start(x, b, h, row(0))
        for i in range(rows):
            for c in range(0, columns, near):
                there = (i32(row(i)) < i32(limits[0])) & (i32(e0 + column(c)) < i32(limits[1]))
                place = at + (e0 + column(c)) * (i64(1) if aligned else x.strides[3])
                if loads:
                    vec.load(state, i * columns + c, x.data, place, there, num.zero)
                else:
                    vec.store(x.data, place, there, state, i * columns + c)
            at += LANES * x.strides[2]

    @verb
    def load(state, x, b, h, e0, D, Dv):
        """Load the columns from e0 on of x [B, H, D, Dv], zeros beyond it."""
        _move(state, x, b, h, e0, (D, Dv), True)

    @verb
    def store(x, b, h, e0, D, Dv, state):
        """Store to the columns from e0 on of x [B, H, D, Dv], nothing beyond it."""
        _move(state, x, b, h, e0, (D, Dv), False)

    @verb
    def take(frag, smem, at):
        """Read my columns of a row of shared memory."""
        for c in range(0, columns, near):
            row_of.load(frag, c, smem, u32(at + column(c)))

    @verb
    def put(smem, at, frag):
        for c in range(0, columns, near):
            if aligned:
                num.store_vector(smem, at + column(c), frag, c)
            else:
                smem[u32(at + column(c))] = frag[c]

    return members(
        locals(),
        rows=rows,
        columns=columns,
        norms=max(rows, columns),  # numbers of a norm, enough for rows or columns
    )


@noun
def fetched(dtype: str, tile: Tile) -> Members:
    """A thread's numbers of a tile on its way to shared memory. All loads start before the first number is stored. The
    lines of the tile, of an array of this dtype, are next to each other.
    """
    mem, number, width = storage(dtype), storage(dtype).number, tile.width
    num, count = numbers(number), cdiv(tile.rows * width, THREADS)

    @verb
    def line(n):
        """Return the line of number n."""
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) // u32(width))

    @verb
    def column(n):
        """Return the column of number n."""
        return i32((u32(cuda.threadIdx.x) + u32(THREADS * n)) % u32(width))

    @verb
    def load(frag, part):
        """Load the numbers; zeros beyond the lines and columns."""
        for n in range(count):
            r, c = min(line(n), i32(part.count - 1)), min(column(n), i32(part.columns - 1))
            value = mem.load(part.data, part.first + r * part.step + c)
            frag[n] = value if (line(n) < part.count) & (column(n) < part.columns) else num.zero

    @verb
    def put(smem, frag, lines):
        """Store this number of lines of the tile to shared memory."""
        for n in range(count):
            if line(n) < lines:
                smem[u32(tile.place(line(n), column(n)))] = frag[n]

    return members(locals(), count=count, frag=local_array(count, number))


STEPS_AT_ONCE = 8


class RecurrentLayout(NamedTuple):
    """What is in shared memory for the tokens that are loaded together. D16: D rounded up to 16."""

    q: Tile  # [tokens, D16]
    k: Tile  # [tokens, D16]
    v: Tile  # [tokens, BLOCK_V]
    parts: Tile  # [tokens * LANES, BLOCK_V]: each line's share of a token's result
    norm_parts: Tile  # [tokens, LANES]: each line's share of its row sum
    row_terms: int  # of the tokens
    column_terms: int
    factors: int  # what the state is multiplied by at each token
    nbytes: int


@dataclass(frozen=True)
class RecurrentConfig:
    """A thread's part of the state: state_rows x columns."""

    state_rows: int
    columns: int
    tokens: int = STEPS_AT_ONCE  # that are loaded together
    min_blocks: int = 1  # on an SM

    @cached_property
    def block_v(self) -> int:
        return LANES * self.columns

    def layout(self, dtype: str) -> RecurrentLayout:
        shared = Shared(dtype, THREADS)
        q, k = (shared.tile(self.tokens, LANES * self.state_rows, pad=0) for _ in range(2))
        v = shared.tile(self.tokens, self.block_v, pad=0)
        parts = shared.tile(self.tokens * LANES, self.block_v, pad=0)
        norm_parts = shared.tile(self.tokens, LANES, pad=0)
        row_terms, column_terms, factors = (shared.vector(self.tokens) for _ in range(3))
        return RecurrentLayout(q, k, v, parts, norm_parts, row_terms, column_terms, factors, shared.nbytes)

    def shared_bytes(self, dtype: str, D: int) -> int:
        """Return the shared memory. D: at most LANES * state_rows, for which there is room."""
        return self.layout(dtype).nbytes


@builds
def build_recurrent(config: RecurrentConfig, variant: Variant) -> Kernel:
    """retention_recurrent(out, row_sum, x, ends, norm_ends, decay, call).

    ends, norm_ends: the states and their norms at both ends. decay: gamma, or log_decay. If the variant is aligned, the
    rows of the states are whole 16-byte vectors.
    """
    dtype, gammas = variant.dtype, step_factors(variant.dtype, variant.stepwise)
    mem, num, tile = storage(dtype), numbers(storage(dtype).number), config.layout(dtype)
    held = state_registers(dtype, config.state_rows, config.columns, aligned=variant.aligned)
    q_rows, k_rows, v_rows = fetched(dtype, tile.q), fetched(dtype, tile.k), fetched(dtype, tile.v)

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
        q, k, v, weights, terms, _ = x
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid, line, lane = i32(cuda.threadIdx.x), held.line(), held.lane()
        block, v_blocks = u32(cuda.blockIdx.x), u32(call.Dv + config.block_v - 1) // u32(config.block_v)
        head, e0 = block // v_blocks, i32(block % v_blocks * u32(config.block_v))
        b, h = i64(head // u32(call.H)), i64(head % u32(call.H))

        state = cuda.local.array(held.rows * held.columns, mem.number)
        norm = cuda.local.array(held.norms, mem.number)  # of my rows, in the gradient of my columns
        part, value = cuda.local.array(held.columns, mem.number), cuda.local.array(held.columns, mem.number)
        held.load(state, ends.initial, b, h, e0, call.D if ends.begins != 0 else 0, call.Dv)
        if variant.normalized:
            for i in range(held.norms):
                norm[i] = num.zero
                at, width = held.row(i), call.D
                if call.normed == OF_COLUMNS:
                    at, width = e0 + held.column(i), call.Dv
                if (norm_ends.begins != 0) & (at < width):
                    norm[i] = norm_ends.initial.data[start(norm_ends.initial, b, h, at)]

        first, rows, _ = span(call, b)
        count = i32(rows)
        token0 = origin(call, first, count)
        queries, keys, values = q_rows.frag(), k_rows.frag(), v_rows.frag()
        for t0 in range(i32(0), count, i32(config.tokens)):
            steps, token = i32(1), token0 + call.direction * t0
            if config.tokens > 1:
                steps = i32(min(count - t0, config.tokens))
            mine, made_of = token + call.direction * (tid - 1 + call.later), num.one  # the step before my token
            if (tid < steps) & (t0 + tid + call.later > 0):
                made_of = gammas.read(decay, call, b, h, mine)
            q_step, k_step = call.direction * q.strides[2], call.direction * k.strides[2]
            v_step = call.direction * v.strides[2]
            q_rows.load(queries, Part(q.data, start(q, b, h, token), q_step, steps, call.D, 0))
            k_rows.load(keys, Part(k.data, start(k, b, h, token), k_step, steps, call.D, 0))
            v_rows.load(values, Part(v.data, start(v, b, h, token) + e0, v_step, steps, call.Dv - e0, 0))
            if tid < steps:
                factor = num.one
                if t0 + tid + call.later > 0:
                    factor = gammas.factor(made_of, call, h)
                smem[u32(tile.factors + tid)] = factor
                if variant.normalized:
                    mine = token + call.direction * tid
                    smem[u32(tile.row_terms + tid)] = num.one
                    smem[u32(tile.column_terms + tid)] = num.one
                    if call.row_term != 0:
                        smem[u32(tile.row_terms + tid)] = terms.data[start(terms, b, h, mine)]
                    if call.column_term != 0:
                        smem[u32(tile.column_terms + tid)] = terms.data[start(terms, b, h, mine)]
            for n in range(v_rows.count):
                values[n] *= call.kept_scale
                if variant.normalized and (call.column_weighted != 0) & (v_rows.line(n) < steps):
                    values[n] *= weights.data[start(weights, b, h, token + call.direction * v_rows.line(n))]
            q_rows.put(smem, queries, steps)
            k_rows.put(smem, keys, steps)
            v_rows.put(smem, values, steps)
            cuda.syncthreads()

            for t in range(steps):
                factor = smem[u32(tile.factors + t)]
                held.take(value, smem, tile.v.place(t, 0))
                for c in range(held.columns):
                    part[c] = num.zero
                norm_part = num.zero
                q_at, k_at = u32(opaque_i32(tile.q.place(t, line))), u32(opaque_i32(tile.k.place(t, line)))
                for i in range(held.rows):
                    query, key = smem[q_at + u32(LANES * i)], smem[k_at + u32(LANES * i)]
                    for c in range(held.columns):
                        state[i * held.columns + c] = state[i * held.columns + c] * factor + key * value[c]
                        part[c] += query * state[i * held.columns + c]
                    if variant.normalized and call.normed == OF_ROWS:
                        norm[i] = norm[i] * factor + key
                        norm_part += query * norm[i]
                if variant.normalized and call.normed == OF_COLUMNS:
                    term, row_term = smem[u32(tile.column_terms + t)], smem[u32(tile.row_terms + t)]
                    for c in range(held.columns):
                        norm[c] = norm[c] * factor + (term * value[c] if term != num.zero else num.zero)
                        if line == 0:
                            part[c] += row_term * norm[c]
                held.put(smem, tile.parts.place(t * LANES + line, 0), part)
                if variant.normalized and lane == 0:
                    smem[u32(tile.norm_parts.place(t, line))] = norm_part
            cuda.syncthreads()

            for n in range(v_rows.count):
                t, c = v_rows.line(n), v_rows.column(n)
                if t < steps:
                    mine, total, size = token + call.direction * t, num.zero, num.one
                    parts_at = u32(opaque_i32(tile.parts.place(t * LANES, c)))
                    for i in range(LANES):
                        total += smem[parts_at + u32(i * tile.parts.row)]
                    total *= call.state_scale
                    if variant.normalized and call.normed == OF_ROWS:
                        norm_total = num.zero
                        for i in range(LANES):
                            norm_total += smem[u32(tile.norm_parts.place(t, i))]
                        norm_total *= call.state_scale
                        if not abs(norm_total) <= num.one:  # a NaN too
                            size = abs(norm_total)
                        if (call.sums != 0) & (e0 + c == 0):
                            row_sum.data[start(row_sum, b, h, mine)] = norm_total
                        total /= size
                    if variant.normalized and call.row_weighted != 0:
                        total *= weights.data[start(weights, b, h, mine)]
                    if e0 + c < call.Dv:
                        mem.store(out.data, start(out, b, h, mine) + e0 + c, total)

        last = num.one  # a pass back ends before its last token, the sequence's first one
        if (call.later == 0) & (count > 0):
            last = gammas.factor(gammas.read(decay, call, b, h, first), call, h)
        for n in range(held.rows * held.columns):
            state[n] *= last
        held.store(ends.final, b, h, e0, call.D if ends.finishes != 0 else 0, call.Dv, state)
        if variant.normalized:
            for i in range(held.norms):
                at, width, writer = held.row(i), call.D, (lane == 0) & (e0 == 0)
                if call.normed == OF_COLUMNS:
                    at, width, writer = e0 + held.column(i), call.Dv, (line == 0) & (i < held.columns)
                if (norm_ends.finishes != 0) & writer & (at < width):
                    norm_ends.final.data[start(norm_ends.final, b, h, at)] = norm[i] * last

    return retention_recurrent
