"""The gradient of log_decay: the sum over all pairs of a key before a step and a query at the step or after it.

    dlog_decay_t = sum_(j < t <= i) s_ij ds_ij        with the initial state as one more key, dstate as one more query

By chunks of T tokens the state before a chunk is the key of everything before it. The gradient of the state after the
chunk is the query of everything after it. Nothing is subtracted: a result is as exact as its terms, and a NaN reaches
only the steps that it passes over.

    1  taken_i = q_i . (what dq_i has of the state before its chunk)                            `build_state_terms`
       given_j = k_j . (what dk_j has of the gradient of the state after it)                    the same, of a pass back
    2  for each tile of queries of a chunk, and each tile of keys up to it:                     `build_step_gradient`
    3      P [BLOCK, BLOCK] = ds_ij * q_i . k_j                                                 as in dq and in o
    4      keys before the tile of queries: their column sums pass over all keys after them; row sums are kept
       the same tile: what a row has of keys before t, summed over the rows from t on
    5  dlog_decay_t = result of 4 for t + sum_(i >= t) taken_i + sum_(j < t) given_j + decay * (state . dstate)

Step 4 starts each row with its taken. Both states have chunks that begin with the sequence. In the pass back
(`mirrored`) the first chunk is therefore the short one.

Shared memory of 2: itemsize * (2 * BLOCK * (DEPTH + 4) + BLOCK * (BLOCK + 4) + 2 * BLOCK + 2 * LONGEST_CHUNK).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...spec.meta import compute_dtype
from ..compiler.backend import Kernel, builds, cuda, i64, kernel, types, u32, verb
from ..launch.views import number_type, start, strided
from ..tile.numbers import numbers
from ..tile.products import mma_ab, mma_abt
from ..tile.rows import lane_reductions
from ..tile.shared import Part, Shared, Tile
from ..tile.storage import storage
from ..tile.vector_load import vector_tile
from .arguments import (
    LONGEST_CHUNK,
    OF_COLUMNS,
    ChunkStates,
    Variant,
    call_type,
    chunk_states_type,
    inputs_type,
    origin,
    slot_of,
)
from .decays import step_decays
from .simt_rows import RowsConfig
from .simt_states import chunk_of

DEPTH = 32  # numbers of a row that are multiplied at a time


class StateTerms(NamedTuple):
    """What the state before its chunk contributes to each token of a pass, and these states."""

    tokens: Any  # [B, H, S]: taken or given
    before: ChunkStates
    first_chunk: Any  # the first one that has a state before it


def state_terms_type(dtype: str) -> Any:
    """Return the type of `StateTerms`."""
    return types.NamedTuple((number_type(dtype, 3), chunk_states_type(dtype), i64), StateTerms)


class StateTermsLayout(NamedTuple):
    """What is in shared memory in step 1."""

    x: Tile  # [BLOCK, DEPTH]
    state: Tile  # [DEPTH, columns of a thread's neighbours]
    nbytes: int


class StepsLayout(NamedTuple):
    """What is in shared memory in step 2."""

    rows: Tile  # [BLOCK, DEPTH] of Q, or dO
    columns: Tile  # [BLOCK, DEPTH] of K, or V
    p: Tile  # [BLOCK, BLOCK]
    before: int  # what BLOCK rows have of keys before the tile, and of the state
    sums: int  # of BLOCK columns of P
    passed: int  # of LONGEST_CHUNK tokens: their results so far
    given: int  # of LONGEST_CHUNK tokens
    nbytes: int


def terms_layout(config: RowsConfig, dtype: str, *, aligned: bool = False) -> StateTermsLayout:
    """Return the layout of step 1. aligned: rows of the arrays are whole vectors."""
    shared = Shared(dtype, config.threads)
    x = vector_tile(shared, config.block_q, DEPTH, aligned=aligned)
    state = vector_tile(shared, DEPTH, config.lanes * config.near, aligned=aligned, dtype=compute_dtype(dtype))
    return StateTermsLayout(x, state, shared.nbytes)


def steps_layout(config: RowsConfig, dtype: str, *, aligned: bool = False) -> StepsLayout:
    """Return the layout of step 2. aligned: rows of the arrays are whole vectors."""
    shared, block = Shared(dtype, config.threads), config.block_q
    rows, columns = (vector_tile(shared, block, DEPTH, aligned=aligned) for _ in range(2))
    p = shared.tile(block, block)
    before, sums, passed, given = (shared.vector(n) for n in (block, block, LONGEST_CHUNK, LONGEST_CHUNK))
    return StepsLayout(rows, columns, p, before, sums, passed, given, shared.nbytes)


@builds
def build_state_terms(config: RowsConfig, variant: Variant, mirrored: bool) -> Kernel:
    """retention_state_terms(of_state, x, y, decay, call): step 1.

    For each row r it computes what the result has of the state before its chunk, times y_r.
    """
    mem, decays = storage(variant.dtype), step_decays(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, config.lanes)
    tile, rows_of = terms_layout(config, variant.dtype, aligned=variant.aligned), chunk_of(mirrored)
    x_state = mma_ab(mem.number, tile.x, tile.state, config.tile_q, config.near, config.lanes, looped=True)

    @kernel(
        state_terms_type(variant.dtype),
        inputs_type(variant.dtype),
        strided(variant.dtype, 3),
        decays.argument,
        call_type(variant.dtype),
        threads=config.threads,
    )
    def retention_state_terms(of_state, x, y, decay, call):
        (states, norms), q, weights, terms = of_state.before, x.q, x.weights, x.terms
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % config.lanes, tid // config.lanes
        blocks = (call.state_chunk + config.block_q - 1) // config.block_q  # of a chunk
        place = i64(cuda.blockIdx.x) // blocks
        chunk = place % call.slots
        b, h, first, count, t0, end = rows_of(call, chunk, place // call.slots)
        m0 = t0 + i64(cuda.blockIdx.x) % blocks * config.block_q
        if m0 >= end:
            return
        row0 = origin(call, first, count)
        mine = decays.of(decay, call, b, h, first, count)
        m = m0 + line * x_state.rows  # my first row
        sums = cuda.local.array(x_state.rows, mem.number)  # my share of a row's sum; the lanes add up at the end
        for i in range(x_state.rows):
            sums[i] = num.zero
        acc = x_state.fragment()
        there = chunk >= of_state.first_chunk
        if there:
            slot = slot_of(call, first, b, chunk)
            state = slot * states.strides[0] + h * states.strides[1]
            norm = slot * norms.strides[0] + h * norms.strides[1]
            q_start, q_step = start(q, b, h, row0 + call.direction * m0), call.direction * q.strides[2]
            for e0 in range(0, call.Dv, tile.state.width):
                x_state.clear(acc)
                for d in range(0, call.D, DEPTH):
                    left = call.D - d
                    cuda.syncthreads()
                    tile.x.load(smem, Part(q.data, q_start + d, q_step, end - m0, left, 0))
                    tile.state.load(smem, Part(states.data, state + d * call.Dv + e0, call.Dv, left, call.Dv - e0, 0))
                    cuda.syncthreads()
                    # acc [BLOCK, columns] += x @ state
                    x_state.add_part(acc, smem, tile.x.at, min((left + 3) // 4 * 4, DEPTH))
                for i in range(x_state.rows):
                    if m + i < end:
                        y_row = start(y, b, h, row0 + call.direction * (m + i))
                        for c in range(x_state.columns):
                            e = e0 + x_state.column(c)
                            if e < call.Dv:
                                sums[i] += acc[i * x_state.columns + c] * mem.load(y.data, y_row + e)
            if variant.normalized and call.normed == OF_COLUMNS:
                for i in range(x_state.rows):
                    if m + i < end:
                        row = row0 + call.direction * (m + i)
                        term, y_row = num.one, start(y, b, h, row)
                        if call.row_term != 0:
                            term = terms.data[start(terms, b, h, row)]
                        for e in range(lane, call.Dv, config.lanes):
                            sums[i] += term * norms.data[norm + e] * mem.load(y.data, y_row + e)
        for i in range(x_state.rows):
            total = lanes.sum(sums[i])
            if (m + i < end) & (lane == 0):
                row = row0 + call.direction * (m + i)
                if there:
                    total *= decays.between(mine, t0, m + i + call.later) * call.state_scale
                    if variant.normalized and call.row_weighted != 0:
                        total *= weights.data[start(weights, b, h, row)]
                of_state.tokens.data[start(of_state.tokens, b, h, row)] = total

    return retention_state_terms


@builds
def build_step_gradient(config: RowsConfig, variant: Variant) -> Kernel:
    """retention_step_gradient(dlogs, q, x, forth, back, decay, call): steps 2 to 5, a chunk a block.

    x, call: those of the pass dq, whose q, k and v are do, v and k. forth, back: what step 1 left.
    """
    mem, decays = storage(variant.dtype), step_decays(variant.dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, config.lanes)
    tile, BLOCK = steps_layout(config, variant.dtype, aligned=variant.aligned), config.block_q
    rows_of = chunk_of(False)
    product = mma_abt(mem.number, tile.rows, tile.columns, config.tile_q, config.tile_kv, config.lanes, looped=True)

    @verb
    def multiply(out, smem, arrays, place, counts, width):
        """out [BLOCK, BLOCK] = X @ Y.T. counts: tokens of X and of Y. place: batch, head, the first token of both."""
        x, y = arrays
        b, h, m, n = place
        product.clear(out)
        for d in range(0, width, DEPTH):
            cuda.syncthreads()
            tile.rows.load(smem, Part(x.data, start(x, b, h, m) + d, x.strides[2], counts[0], width - d, 0))
            tile.columns.load(smem, Part(y.data, start(y, b, h, n) + d, y.strides[2], counts[1], width - d, 0))
            cuda.syncthreads()
            product.add_part(out, smem, tile.rows.at, min((width - d + 3) // 4 * 4, DEPTH))

    @verb
    def add_product(total, of_x, of_y, h, size):
        """Return total plus my share of x . y, states of head h in their slots."""
        (x, x_slot), (y, y_slot) = of_x, of_y
        x_first, y_first = x_slot * x.strides[0] + h * x.strides[1], y_slot * y.strides[0] + h * y.strides[1]
        for e in range(cuda.threadIdx.x, size, config.threads):
            total += x.data[x_first + e] * y.data[y_first + e]
        return total

    @kernel(
        number_type(variant.dtype, 3),
        strided(variant.dtype, 3),
        inputs_type(variant.dtype),
        *[state_terms_type(variant.dtype)] * 2,
        decays.argument,
        call_type(variant.dtype),
        threads=config.threads,
    )
    def retention_step_gradient(dlogs, q, x, forth, back, decay, call):
        (do, v, k, weights, terms, _), taken, given = x, forth.tokens, back.tokens
        (states, norms), (dstates, dnorms) = forth.before, back.before
        smem = cuda.shared.array(0, mem.number, alignment=16)
        tid = cuda.threadIdx.x
        lane, line = tid % config.lanes, tid // config.lanes
        chunk = i64(cuda.blockIdx.x) % call.slots
        b, h, first, count, t0, end = rows_of(call, chunk, i64(cuda.blockIdx.x) // call.slots)
        if t0 >= count:
            return
        mine = decays.of(decay, call, b, h, first, count)
        scores, slopes = product.fragment(), product.fragment()
        for t in range(tid, end - t0, config.threads):
            smem[u32(tile.passed + t)] = num.zero
            smem[u32(tile.given + t)] = given.data[start(given, b, h, first + t0 + t)]

        for m0 in range(t0, end, BLOCK):
            for r in range(tid, BLOCK, config.threads):
                smem[u32(tile.before + r)] = num.zero
                if m0 + r < end:
                    smem[u32(tile.before + r)] = taken.data[start(taken, b, h, first + m0 + r)]
            cuda.syncthreads()
            base = num.zero  # the sum of all that passes over the first key of the next tile
            for r in range(BLOCK):
                base += smem[u32(tile.before + r)]
            for n0 in range(t0, m0 + 1, BLOCK):
                multiply(scores, smem, (q, k), (b, h, first + m0, first + n0), (end - m0, end - n0), call.Dv)
                multiply(slopes, smem, (do, v), (b, h, first + m0, first + n0), (end - m0, end - n0), call.D)

                for i in range(product.rows):
                    m = m0 + line * product.rows + i
                    weight, term, share = call.scale, num.zero, num.zero
                    to_row, row_rest = decays.sum_at(mine, min(m, end - 1) + call.later)
                    if variant.normalized and m < end:
                        if call.row_weighted != 0:
                            weight *= weights.data[start(weights, b, h, first + m)]
                        if call.row_term != 0:
                            term = terms.data[start(terms, b, h, first + m)]
                    for j in range(product.columns):
                        n = n0 + lane + config.lanes * j
                        passing = num.zero
                        if (n < m) & (m < end):
                            from_key, key_rest = decays.sum_at(mine, n + call.later)
                            factor = decays.fade(mine, from_key, key_rest, to_row, row_rest) * weight
                            at = i * product.columns + j
                            passing = scores[at] * (slopes[at] + term) * factor
                        smem[u32(tile.p.place(line * product.rows + i, lane + config.lanes * j))] = passing
                        share += passing
                    if n0 < m0:
                        total = lanes.sum(share)
                        if lane == 0:
                            smem[u32(tile.before + line * product.rows + i)] += total
                cuda.syncthreads()
                if n0 < m0:
                    for c in range(tid, BLOCK, config.threads):
                        total = num.zero
                        for r in range(BLOCK):
                            total += smem[u32(tile.p.place(r, c))]
                        smem[u32(tile.sums + c)] = total
                    cuda.syncthreads()
                    over = base  # my key
                    for c in range(BLOCK):
                        if c == tid:
                            smem[u32(tile.passed + (n0 - t0) + c)] += over
                        over += smem[u32(tile.sums + c)]
                    base = over
                else:
                    for r in range(tid, BLOCK, config.threads):
                        over = smem[u32(tile.before + r)]
                        for c in range(r + 1):
                            at = tile.p.place(r, c)
                            passing = smem[u32(at)]
                            smem[u32(at)] = over
                            over += passing
                    cuda.syncthreads()
                    for c in range(tid, BLOCK, config.threads):
                        total = num.zero
                        for r in range(c, BLOCK):
                            total += smem[u32(tile.p.place(r, c))]
                        if m0 + c < end:
                            smem[u32(tile.passed + (m0 - t0) + c)] += total

        chunks = (count + call.state_chunk - 1) // call.state_chunk
        behind = chunks - 1 - chunk
        both = num.zero  # my share of state . dstate
        if (chunk >= forth.first_chunk) & (behind >= back.first_chunk):
            here, there = slot_of(call, first, b, chunk), slot_of(call, first, b, behind)
            both = add_product(both, (states, here), (dstates, there), h, i64(call.D) * call.Dv)
            if variant.normalized and call.normed == OF_COLUMNS:
                both = add_product(both, (norms, here), (dnorms, there), h, call.Dv)
            both *= decays.between(mine, t0, end)
        both = lanes.sum(both)
        if lane == 0:
            smem[u32(tile.sums + line)] = both
        cuda.syncthreads()
        for t in range(tid, end - t0, config.threads):
            total = smem[u32(tile.passed + t)]
            for i in range(config.lanes):
                total += smem[u32(tile.sums + i)]
            for j in range(t):
                total += smem[u32(tile.given + j)]
            dlogs.data[start(dlogs, b, h, first + t0 + t)] = total

    return retention_step_gradient
