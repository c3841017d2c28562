"""Rows of retention without tensor cores: any GPU, any dtype. Sun et al. 2023, arXiv:2307.08621, equations 5 and 7.

A block of 16 x 16 threads has BLOCK_Q rows and BLOCK_V columns of the result. In the chunk form a row reads the columns
of its own chunk one by one, and everything before the chunk through the state. The parallel form has one chunk.

    1  acc [BLOCK_Q, BLOCK_V] = state_scale * gamma^(r - first row of the chunk + later) * Q @ state
    2  for each tile of BLOCK_KV columns of the chunk, up to the last that is seen:
    3      P [BLOCK_Q, BLOCK_KV] = scale * Q @ K.T * gamma^(r - c), or times the mask
    4      acc += P @ V
    5  out = acc / n

Q stays in shared memory. K is loaded DEPTH numbers of a row at a time, the state BLOCK_KV rows at a time. The products
of a tile are summed before they are added to acc. P is -0 for a pair that is not seen: this adds nothing. If V holds a
NaN or an infinity, -0 marks the products to skip, so that nothing after a row reaches it. If scores have terms, Q
and K have one more column: the terms in one of them, ones in the other. The state then has one more row, the norm.

Shared memory: itemsize * (BLOCK_Q * (D' + BLOCK_KV + 4) + BLOCK_KV * (max(DEPTH, BLOCK_V) + 5)), D' being DEPTH + 4 for
each DEPTH columns of Q.

Registers: tile_q * (BLOCK_V / 16 + max(tile_kv, 4)) numbers and about 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, Members, Noun, builds, cuda, i32, i64, kernel, members, noun, u32, verb
from ..launch.arrays import cdiv
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import LANES, mma_ab, mma_abt
from ..tile.rows import lane_reductions
from ..tile.shared import Part, Shared, Tile
from ..tile.storage import storage
from ..tile.vector_load import vector_tile
from .arguments import (
    ABS,
    OF_COLUMNS,
    OF_ROWS,
    Variant,
    call_type,
    chunk_states_type,
    inputs_type,
    origin,
    slot_of,
    span,
)
from .decays import decays_of, step_decays

Slices = Noun  # the result of `_slices`


class RowsLayout(NamedTuple):
    """What is in shared memory. K, V and the state share one place."""

    k: Tile  # [BLOCK_KV, DEPTH]
    v: Tile  # [BLOCK_KV, BLOCK_V]
    state: Tile  # [BLOCK_KV, BLOCK_V]
    p: Tile  # [BLOCK_Q, BLOCK_KV]
    weights: int  # of BLOCK_KV rows of V
    q: Slices  # [BLOCK_Q, D]
    nbytes: int


@dataclass(frozen=True)
class RowsConfig:
    """A thread has tile_q x tile_kv scores, and tile_q rows of `groups` times `near` columns of the result."""

    tile_q: int
    tile_kv: int
    groups: int
    depth: int  # a multiple of block_kv
    near: int = 4
    lanes: int = LANES  # threads of a row; a block has as many rows of threads
    min_blocks: int = 1

    @cached_property
    def threads(self) -> int:
        return self.lanes**2

    @cached_property
    def block_q(self) -> int:
        return self.lanes * self.tile_q

    @cached_property
    def block_kv(self) -> int:
        return self.lanes * self.tile_kv

    @cached_property
    def block_v(self) -> int:
        return self.lanes * self.near * self.groups

    def layout(self, dtype: str, D: int, *, aligned: bool = False, weighted: bool = False) -> RowsLayout:
        """Return the layout. aligned: rows of the arrays are whole vectors; weighted: V's rows may have weights."""
        shared = Shared(dtype, self.threads)
        tile = partial(vector_tile, shared, aligned=aligned)
        k = tile(self.block_kv, self.depth)
        v = tile(self.block_kv, self.block_v, over=k, weighted=weighted, checked=True)
        state = tile(self.block_kv, self.block_v, over=k, dtype=compute_dtype(dtype))
        p, weights = shared.tile(self.block_q, self.block_kv), shared.vector(self.block_kv)
        q = _slices(tile(self.block_q, self.depth, stages=cdiv(D, self.depth)))
        return RowsLayout(k, v, state, p, weights, q, shared.nbytes)

    def shared_bytes(self, dtype: str, D: int) -> int:
        return self.layout(dtype, D).nbytes


@noun
def _slices(tile: Tile) -> Members:
    """Q in shared memory: a tile for every DEPTH columns, and room for one column more."""

    @verb
    def at(d):
        """Return where the slice with column d begins."""
        return tile.at + d // tile.width * tile.size

    @verb
    def place(r, d, D):
        """Return the index of column d of row r. There are D columns and one more."""
        number = min(d, D - 1) // tile.width
        return tile.at + number * tile.size + d - number * tile.width + r * tile.row

    @verb
    def load(smem, part, d):
        """Load the slice that begins with column d."""
        tile.load(smem, part, at(d))

    return members(
        locals(),
        first=tile,  # the first one: a product reads one slice
    )


@verb
def append(smem, place, number):
    """Write one more number to a row, and zeros up to a multiple of four."""
    smem[u32(place)] = number
    for i in range(1, 4):
        smem[u32(place + i)] = 0


def rows_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of the arguments of a kernel of rows."""
    dtype, decay = variant.dtype, decays_of(variant.dtype, variant.stepwise).argument
    inputs, before = inputs_type(dtype, variant.mask), chunk_states_type(dtype)
    return strided(dtype, 3), number_type(dtype, 3), inputs, before, decay, call_type(dtype)


@builds
def build_rows(config: RowsConfig, variant: Variant) -> Kernel:
    """retention_rows(out, row_sum, x, before, decay, call). before: `ChunkStates`."""
    mem, mask_mem = storage(variant.dtype), storage(variant.mask or variant.dtype)
    decays, steps = decays_of(variant.dtype, variant.stepwise), step_decays(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, config.lanes)
    tile = config.layout(variant.dtype, config.depth, aligned=variant.aligned, weighted=variant.normalized)
    qk = mma_abt(mem.number, tile.q.first, tile.k, config.tile_q, config.tile_kv, config.lanes, looped=True)
    pv = mma_ab(mem.number, tile.p, tile.v, config.tile_q, config.near, config.lanes, looped=True)
    q_state = mma_ab(mem.number, tile.q.first, tile.state, config.tile_q, config.near, config.lanes, looped=True)

    @kernel(*rows_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def retention_rows(out, row_sum, x, before, decay, call):
        (q, k, v, weights, terms, mask), (states, norms) = x, before
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % config.lanes, tid // config.lanes
        q_blocks = (call.rows + config.block_q - 1) // config.block_q
        v_blocks = (call.Dv + config.block_v - 1) // config.block_v
        place, head = cuda.blockIdx.x // v_blocks, cuda.blockIdx.x // v_blocks // q_blocks
        e0 = i64(cuda.blockIdx.x % v_blocks * config.block_v)
        m0 = i64(q_blocks - 1 - place % q_blocks) * config.block_q  # the last block first: the parallel form's longest
        b, h = i64(head // call.H), i64(head % call.H)
        first, rows, columns = span(call, b)
        if m0 >= rows:
            return
        row0, column0 = origin(call, first, rows), origin(call, first, columns)
        chunk = (q_blocks - 1 - place % q_blocks) * config.block_q // call.chunk
        n_first = i64(chunk) * call.chunk
        mine = num.zero
        if not variant.masked:
            mine = decays.of(decay, call, b, h, first, rows)

        m = m0 + line * qk.rows  # my first row
        sums = cuda.local.array(qk.rows, mem.number)  # my share of a row's sum; the lanes add up at the end
        seen_by = cuda.local.array(qk.rows, i32)  # columns of the chunk that my row sees
        for i in range(qk.rows):
            end = columns
            if not variant.masked:
                end = min(m + i + call.offset + 1, columns)
            seen_by[i] = i32(end - n_first if m + i < rows else 0)
            sums[i] = num.zero
        acc = pv.fragment()
        pv.clear(acc)
        scores = qk.fragment()

        q_start, q_step = start(q, b, h, row0 + call.direction * m0), call.direction * q.strides[2]
        for d in range(0, call.D, config.depth):
            tile.q.load(smem, Part(q.data, q_start + d, q_step, rows - m0, call.D - d, 0), d)
        more = 0  # columns of terms or ones that Q and K have after D
        if variant.normalized and call.normed == OF_COLUMNS:
            more = 1
        if more != 0:
            cuda.syncthreads()
            for r in range(tid, config.block_q, config.threads):
                term = num.one
                if (call.row_term != 0) & (m0 + r < rows):
                    term = terms.data[start(terms, b, h, row0 + call.direction * (m0 + r))]
                append(smem, tile.q.place(r, call.D, call.D), term)

        if chunk >= call.first_chunk:
            slot = slot_of(call, first, b, chunk)
            state = slot * states.strides[0] + h * states.strides[1] + e0
            norm = slot * norms.strides[0] + h * norms.strides[1]
            for d in range(0, call.D + more, config.block_kv):
                cuda.syncthreads()
                left = call.D - d
                tile.state.load(smem, Part(states.data, state + d * call.Dv, call.Dv, left, call.Dv - e0, 0))
                cuda.syncthreads()
                if (more != 0) & (left < config.block_kv):
                    for e in range(tid, min(call.Dv - e0, config.block_v), config.threads):
                        smem[u32(tile.state.place(left, e))] = norms.data[norm + e0 + e]
                    cuda.syncthreads()
                count = min((left + more + 3) // 4 * 4, config.block_kv)
                # acc [BLOCK_Q, BLOCK_V] += Q @ state
                q_state.add_part(acc, smem, tile.q.place(0, d, call.D), count)
            if variant.normalized and call.normed == OF_ROWS:
                for d in range(lane, call.D, config.lanes):
                    for i in range(qk.rows):
                        at = tile.q.place(line * qk.rows + i, d, call.D)
                        sums[i] += smem[u32(at)] * norms.data[norm + d]
            for i in range(qk.rows):
                row = m + i
                if variant.stepwise:  # prefix sums exist for rows of the sequence alone
                    row = min(row, rows - 1)
                factor = decays.between(mine, n_first, row + call.later) * call.state_scale
                sums[i] *= factor
                for c in range(pv.columns):
                    acc[i * pv.columns + c] *= factor

        n_end = columns
        if not variant.masked:
            n_end = min(m0 + config.block_q + call.offset, columns)
        k_step, v_step = call.direction * k.strides[2], call.direction * v.strides[2]
        for n0 in range(n_first, n_end, config.block_kv):
            token = column0 + call.direction * n0
            k_start, v_start = start(k, b, h, token), start(v, b, h, token) + e0
            qk.clear(scores)
            for d in range(0, call.D, config.depth):
                left = call.D - d
                cuda.syncthreads()
                tile.k.load(smem, Part(k.data, k_start + d, k_step, columns - n0, left, 0))
                cuda.syncthreads()
                depth = config.depth
                if left <= config.depth:
                    depth = (left + more + 3) // 4 * 4
                    if more != 0:
                        for r in range(tid, config.block_kv, config.threads):
                            term = num.one
                            if (call.column_term != 0) & (n0 + r < columns):
                                term = terms.data[start(terms, b, h, token + call.direction * r)]
                            append(smem, tile.k.place(r, left), term)
                        cuda.syncthreads()
                # scores [BLOCK_Q, BLOCK_KV] += Q @ K.T
                qk.add_part(scores, smem, tile.q.at(d), depth)

            if variant.normalized:
                for r in range(tid, config.block_kv, config.threads):
                    weight = num.one
                    if (call.column_weighted != 0) & (n0 + r < columns):
                        weight = weights.data[start(weights, b, h, token + call.direction * r)]
                    smem[u32(tile.weights + r)] = weight
            apart = mem.number(m + call.offset - n0 - lane)  # the distance of my first row and column
            for i in range(qk.rows):
                share, to_row, row_rest = num.zero, num.zero, num.zero
                if variant.stepwise:
                    to_row, row_rest = steps.sum_at(mine, min(m + i, rows - 1) + call.later)
                for j in range(qk.columns):
                    n = n0 + lane + config.lanes * j
                    seen = i32(n - n_first) < seen_by[i]
                    if variant.masked:
                        factor = num.zero
                        if seen:
                            row, column = row0 + call.direction * (m + i), column0 + call.direction * n
                            factor = mem.number(mask_mem.load(mask.data, start(mask, h, row, column)))
                    elif variant.stepwise:
                        from_column, column_rest = steps.sum_at(mine, min(n, columns - 1) + call.later)
                        factor = steps.fade(mine, from_column, column_rest, to_row, row_rest)
                    else:
                        factor = num.exp2(mine * (apart + mem.number(i - config.lanes * j)))
                    score = scores[i * qk.columns + j] * call.scale * factor + num.zero  # no -0
                    if not seen:
                        score = num.minus_zero
                    smem[u32(tile.p.place(line * qk.rows + i, lane + config.lanes * j))] = score
                    if variant.normalized:
                        share += abs(score) if call.normalize == ABS else score
                if variant.normalized:
                    sums[i] += share

            cuda.syncthreads()
            non_finite = tile.v.load(smem, Part(v.data, v_start, v_step, columns - n0, call.Dv - e0, tile.weights))
            count = min((n_end - n0 + 3) // 4 * 4, config.block_kv)
            if cuda.syncthreads_or(non_finite):
                pv.add_counted(acc, smem, count)
            else:
                pv.add_part(acc, smem, tile.p.at, count)  # acc [BLOCK_Q, BLOCK_V] += P @ V

        left = i32(call.Dv - e0)
        for i in range(qk.rows):
            inverse = num.one
            row = row0 + call.direction * (m + i)
            if variant.normalized and call.normalize != 0:
                total = lanes.sum(sums[i])
                size = abs(total)
                if not size <= num.one:  # a NaN too
                    inverse = num.one / size
                if (call.sums != 0) & (m + i < rows) & (lane == 0) & (e0 == 0):
                    row_sum.data[start(row_sum, b, h, row)] = total
            if m + i < rows:
                if variant.normalized and call.row_weighted != 0:
                    inverse = weights.data[start(weights, b, h, row)]
                to = start(out, b, h, row) + e0
                for c in range(pv.columns):
                    if i32(pv.column(c)) < left:
                        mem.store(out.data, to + pv.column(c), acc[i * pv.columns + c] * inverse)

    return retention_rows
