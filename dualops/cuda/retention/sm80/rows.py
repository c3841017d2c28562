"""Rows of retention by mma.sync, on Ampere and later GPUs. Sun et al. 2023, arXiv:2307.08621, eq. 5 and 7.

A block has BLOCK_Q rows and BLOCK_V columns of the result, a warp has 16 of the rows. In the chunk form rows read the
columns of their own chunk one by one, and everything before it through the state. The parallel form has one chunk. Two
stages of shared memory hold 32 rows of the state, rounded, or BLOCK_KV keys and their values. One stage is multiplied
while registers or cp.async fill the other.

    1  start to load Q and the first rows of the state, or keys and values
    2  for each 32 rows of the state: start to load the next ones; acc [16, BLOCK_V] += Q @ state
    3  acc *= state_scale * gamma^(r - first row of the chunk + later)
    4  for each tile of the chunk, up to the last that is seen:
    5      start to load K and V of the next one
    6      P [16, BLOCK_KV] = scale * Q @ K.T * gamma^(r - c), or times the mask; 0 for a pair that is not seen
    7      acc += P @ V
    8      wait for the next one, all threads
    9  out = acc / n, 16 rows of a warp at a time through shared memory

P stays in registers: accumulators have the layout of the left factor of 7. P and the state are rounded (`floats`). If
the rounding errors count, 7 has a second part (`counts`), and 2 too for narrow heads. A P of 0 times a NaN in V is a
NaN: `nan_repair` fixes that.

The factors of 6 (`pairs_of`), for a thread's rows m and m + 8 and two neighbouring columns of each eight
(`tile.fragment.accumulator`):

    P_rc = scale * (q_r . k_c + terms) * what is left of c at r * weight_c         0 for a pair that is not seen
    sums_r += P_rc, or |P_rc|

Normalized calls sum up the rows on the way. Terms are added to the scores, and the norm is one more row of the state,
as in `simt_rows`.

Shared memory: `Sm80Rows.tiles`, 2 * (BLOCK_Q * D + 2 * BLOCK_KV * (D + BLOCK_V)) bytes. Registers: BLOCK_V / 2 for acc,
BLOCK_KV / 2 for scores and half of that for P, D / 4 for Q if it is held, and about 50.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, i64, kernel, members, noun, u32, verb
from ...launch.views import start
from ...tile.async_copies import cp_async_commit, cp_async_wait_group
from ...tile.numbers import numbers
from ...tile.rows import lane_reductions
from ...tile.shared import Lines
from ...tile.storage import storage
from ...tile.strips import strip_abt
from ...tile.tile_copies import tile_copies
from ...tile.unrolled import unrolled
from ..arguments import ABS, OF_COLUMNS, OF_ROWS, Variant, origin, slot_of, span
from ..decays import LEAST_KEPT, decays_of, step_decays
from ..nan_repair import warp_repair
from ..simt_rows import rows_types
from .config import BOX, ROWS, SLICE, Shape, Sm80Rows
from .floats import float_tile, rounding_left, strip_of_floats
from .states import rows_output

LANES = 4  # of a row
MOST_HELD = 2  # boxes of Q that stay in registers, if nothing else needs them
FEW_SEEN = 64  # tokens: normalized results are largest in rows that see no more
NARROW = 16  # columns of q or of v


class Place(NamedTuple):
    """The position of a thread's scores."""

    b: Any
    h: Any
    m: Any  # its upper row
    n: Any  # its first column
    rows: Any  # of the sequence
    columns: Any
    row0: Any  # the token of row 0
    column0: Any  # the token of column 0
    whole: Any  # whether all of the block's rows see all columns of the tile


@noun
def pairs_of(variant: Variant, block_kv: int) -> Members:
    """The verbs for tiles with this number of columns."""
    num, mem, steps = numbers(f32), storage(variant.mask or variant.dtype), step_decays(variant.dtype)
    QUADS, EIGHT = block_kv // 8, f32(8)

    @verb
    def _row_of(place, half, x, mine, call):
        """Return the last column that a row sees, its prefix_sum and its term."""
        m = place.m + 8 * half
        last, prefix_sum, rest, term = i32(m + call.offset), num.zero, num.zero, num.zero
        if variant.masked:
            last = i32(place.columns - 1)
        if m >= place.rows:
            last = i32(-1)
        if variant.stepwise:
            prefix_sum, rest = steps.sum_at(mine, min(m, place.rows - 1) + call.later)
        if variant.normalized and call.row_term != 0 and m < place.rows:
            term = x.terms.data[start(x.terms, place.b, place.h, place.row0 + call.direction * m)]
        return last, prefix_sum, rest, term

    @unrolled(range(QUADS))
    def _weigh_quads(scores, sums, place, mine, upper, lower, x, call, j):
        for e in range(2):
            n = place.n + (8 * j + e)
            here = n < place.columns
            weight, term, prefix_sum, rest = num.one, num.zero, num.zero, num.zero
            if variant.stepwise:
                prefix_sum, rest = steps.sum_at(mine, min(n, place.columns - 1) + call.later)
            if variant.normalized and call.column_weighted != 0 and here:
                token = place.column0 + call.direction * n
                weight = x.weights.data[start(x.weights, place.b, place.h, token)]
                if call.column_term != 0:
                    term = x.terms.data[start(x.terms, place.b, place.h, token)]
            for half in range(2):
                last, row_prefix_sum, row_rest, row_term = lower if half else upper
                m, seen = place.m + 8 * half, here & (n <= last)
                if variant.masked:
                    factor = num.zero
                    if seen:
                        row, column = place.row0 + call.direction * m, place.column0 + call.direction * n
                        factor = f32(mem.load(x.mask.data, start(x.mask, place.h, row, column)))
                elif variant.stepwise:
                    factor = steps.fade(mine, prefix_sum, rest, row_prefix_sum, row_rest)
                else:
                    factor = num.exp2(mine * f32(i32(m + call.offset - n)))
                score = scores[4 * j + 2 * half + e]
                if variant.normalized:
                    score += row_term + term
                score *= call.scale * factor
                score = score if seen else num.zero
                if variant.normalized:
                    sums[half] += abs(score) if call.normalize == ABS else score
                    score *= weight if seen else num.one
                scores[4 * j + 2 * half + e] = score

    @verb
    def _weigh_by_head(scores, sums, place, mine, x, call):
        """With gamma alone: from the nearest quad on, because the factor falls by gamma^8 from quad to quad."""
        fade, last = num.exp2(mine * EIGHT), i32(place.columns - 1 - place.n)
        for half in range(2):
            for e in range(2):
                apart = i32(place.m + 8 * half + call.offset - place.n - e)  # from the column of quad 0
                if place.whole:
                    factor = num.exp2(mine * f32(apart - 8 * (QUADS - 1))) * call.scale
                    for j in range(QUADS):
                        at = 4 * (QUADS - 1 - j) + 2 * half + e
                        scores[at] *= factor
                        factor *= fade
                else:
                    nearest = apart & 7 if apart < 8 * QUADS else apart - 8 * (QUADS - 1)
                    factor = num.exp2(mine * f32(nearest)) * call.scale
                    for j in range(QUADS):
                        column = 8 * (QUADS - 1 - j)
                        at = column // 2 + 2 * half + e
                        seen = column <= apart
                        score = scores[at] * factor
                        scores[at] = score if seen & (column + e <= last) else num.zero
                        factor = factor * fade if seen else factor

    @verb
    def _weigh(scores, sums, place, mine, x, call):
        upper, lower = _row_of(place, 0, x, mine, call), _row_of(place, 1, x, mine, call)
        _weigh_quads(scores, sums, place, mine, upper, lower, x, call)

    @verb
    def counts(mine, call, m0, n0):
        """Return whether the error of rounding P counts, for a block's rows from m0 and a tile's columns from n0 on. It
        does if a row sees few tokens, or if a result has few numbers: then errors do not average out.
        """
        near = n0 + block_kv > m0 + call.offset  # rows see themselves
        if variant.masked:
            counted = True
        elif variant.stepwise:
            counted = near
        else:
            counted = near & ((mine < LEAST_KEPT) | (m0 + call.offset < FEW_SEEN))
        return counted | (min(call.D, call.Dv) <= NARROW)

    by_head = not (variant.masked or variant.stepwise or variant.normalized)
    return members(
        locals(),
        # (scores, sums, place, mine, x, call): x: `Inputs`; sums: of both rows, where they are wanted
        weigh=_weigh_by_head if by_head else _weigh,
    )


@builds
def build_rows(config: Sm80Rows, variant: Variant, shape: Shape) -> Kernel:
    """retention_rows_sm80(out, row_sum, x, before, decay, call). before: `ChunkStates`."""
    dtype, BLOCK_Q, BLOCK_KV, BLOCK_V = variant.dtype, config.block_q, config.block_kv, shape.columns
    mem, num, lanes, tile = storage(dtype), numbers(f32), lane_reductions(f32, LANES), config.tiles(shape)
    decays, pairs = decays_of(dtype, variant.stepwise), pairs_of(variant, BLOCK_KV)
    q_copies, k_copies, v_copies = (
        tile_copies(box, width, shape.vector, config.threads)
        for box, width in ((tile.q, BOX * shape.boxes), (tile.k, BOX * shape.boxes), (tile.v, BLOCK_V))
    )
    state_tile = float_tile(dtype, tile.q, SLICE, BLOCK_V, config.threads, shape.states)
    plain = not (variant.normalized or variant.masked or variant.stepwise)
    qk = strip_abt(dtype, tile.q, tile.k, shape.boxes, held=plain and shape.boxes <= MOST_HELD)
    pv, rest = strip_of_floats(dtype, tile.v, tile.v_boxes), rounding_left(dtype)
    repair, output = warp_repair(variant, pv.size), rows_output(dtype, shape.whole, BLOCK_V)

    @verb
    def leave_rest(values, count):
        """Replace numbers by their rounding errors."""
        for e in range(0, count, 2):
            values[e], values[e + 1] = rest(values[e], values[e + 1])

    @verb
    def first_of(number, call):
        """Return the first row of slice number `number` of the state. For narrow heads each slice comes twice."""
        return (u32(number) >> u32(1) if min(call.D, call.Dv) <= NARROW else u32(number)) * u32(SLICE)

    @verb
    def fetch(values, states, state, number, e0, call):
        """A slice of the state; of narrow heads the second time what rounding took from it."""
        d = i32(first_of(number, call))
        lines = Lines(states.data, state + i64(d) * call.Dv, call.Dv, i32(call.D - d))
        state_tile.fetch(values, lines, i32(call.Dv - e0))
        if (min(call.D, call.Dv) <= NARROW) & (u32(number) % u32(2) == u32(1)):
            leave_rest(values, state_tile.numbers)

    @verb
    def load_pair(smem, stage, x, n0, place, e0, call):
        k, v = x.k, x.v
        token, count = place.column0 + call.direction * n0, i32(place.columns - n0)
        at = i32(tile.first + stage * tile.stage)
        k_lines = Lines(k.data, start(k, place.b, place.h, token), call.direction * k.strides[2], count)
        v_lines = Lines(v.data, start(v, place.b, place.h, token) + e0, call.direction * v.strides[2], count)
        k_copies.load_some(smem, at, k_lines, i32(call.D))
        v_copies.load_some(smem, i32(at + tile.v_at), v_lines, i32(call.Dv - e0))

    @kernel(*rows_types(variant), threads=config.threads, min_blocks=config.min_blocks)
    def retention_rows_sm80(out, row_sum, x, before, decay, call):
        (q, _, _, weights, terms, _), (states, norms) = x, before
        smem, floats = cuda.shared.array(0, mem.element, alignment=128), cuda.shared.array(0, f32, alignment=128)
        lane, my_rows = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x // 32 * ROWS)
        q_blocks, v_blocks = (call.rows + (BLOCK_Q - 1)) // BLOCK_Q, (call.Dv + (BLOCK_V - 1)) // BLOCK_V
        number, head = cuda.blockIdx.x // v_blocks, cuda.blockIdx.x // v_blocks // q_blocks
        e0 = i32(cuda.blockIdx.x % v_blocks * BLOCK_V)
        m0 = i32((q_blocks - 1 - number % q_blocks) * BLOCK_Q)  # the last block first: the parallel form's longest
        b, h = i64(head // call.H), i64(head % call.H)
        first, rows, columns = span(call, b)
        if m0 >= rows:
            return
        chunk = i32(m0 // call.chunk)
        n_first, n_end = i32(chunk * call.chunk), i32(columns)
        if not variant.masked:
            n_end = i32(min(i64(m0 + BLOCK_Q + call.offset), i64(columns)))
        row0, column0 = origin(call, first, rows), origin(call, first, columns)
        place = Place(b, h, i32(m0 + my_rows + lane // 4), n_first, i32(rows), i32(columns), row0, column0, False)
        slot, slices = i64(-1), u32(0)
        if chunk >= call.first_chunk:
            slot, slices = i64(slot_of(call, first, b, chunk)), u32((call.D + (SLICE - 1)) // SLICE)
            if min(call.D, call.Dv) <= NARROW:
                slices = u32(2 * slices)
        state = slot * states.strides[0] + h * states.strides[1] + e0
        i, end = u32(0), u32(slices + u32((max(i32(n_end - n_first), i32(0)) + (BLOCK_KV - 1)) // BLOCK_KV))
        q_lines = Lines(q.data, start(q, b, h, row0 + call.direction * m0), call.direction * q.strides[2], rows - m0)
        q_copies.load_some(smem, 0, q_lines, i32(call.D))
        some = state_tile.values()
        if slices != u32(0):
            fetch(some, states, state, u32(0), e0, call)
            state_tile.put(smem, floats, i32(tile.first), some)
        elif end != u32(0):
            load_pair(smem, i32(0), x, n_first, place, e0, call)
        cp_async_commit()

        mine = num.zero
        if not variant.masked:
            mine = decays.of(decay, call, b, h, first, rows)
        scores, acc, probs = qk.fragment(), pv.fragment(), pv.left()
        sums, factors = cuda.local.array(2, f32), cuda.local.array(2, f32)
        sums[0], sums[1] = num.zero, num.zero
        cp_async_wait_group(0)
        cuda.syncthreads()
        q_place = qk.place(my_rows, 0)
        q_frag = qk.hold(smem, q_place)
        while i != slices:
            stage, coming = i32(i % u32(2)), i32((i + u32(1)) % u32(2))
            if i + u32(1) != slices:
                fetch(some, states, state, u32(i + u32(1)), e0, call)
            elif i + u32(1) != end:
                load_pair(smem, coming, x, n_first, place, e0, call)
                cp_async_commit()
            at, first_column = i32(tile.first + stage * tile.stage), i32(first_of(i, call))
            state_tile.add(acc, smem, floats, (q_place, first_column), at)  # acc [16, BLOCK_V] += Q @ state
            if i + u32(1) != slices:
                state_tile.put(smem, floats, i32(tile.first + coming * tile.stage), some)
            cp_async_wait_group(0)
            cuda.syncthreads()
            i = u32(i + u32(1))

        if slot >= 0:
            for half in range(2):
                # prefix sums exist for rows of the sequence alone
                m = i32(min(i64(place.m + 8 * half), i64(rows - 1)))
                factors[half] = decays.between(mine, n_first, m + call.later) * call.state_scale
                one = num.one
                if variant.normalized:
                    if call.row_term != 0:
                        one = terms.data[start(terms, b, h, row0 + call.direction * m)]
                    if call.normed == OF_ROWS:
                        q_row = start(q, b, h, row0 + call.direction * m)
                        norm = slot * norms.strides[0] + h * norms.strides[1]
                        for d in range(lane % LANES, call.D, LANES):
                            sums[half] += mem.load(q.data, q_row + d) * norms.data[norm + d]
                        sums[half] *= factors[half]
                    if call.normed == OF_COLUMNS:
                        norm = slot * norms.strides[0] + h * norms.strides[1]
                        for j in range(pv.size // 4):
                            for e in range(2):
                                column = e0 + 8 * j + 2 * (lane % LANES) + e
                                if column < call.Dv:
                                    acc[4 * j + 2 * half + e] += one * norms.data[norm + column]
                for j in range(pv.size // 4):
                    for e in range(2):
                        acc[4 * j + 2 * half + e] *= factors[half]

        n0 = n_first
        while i != end:
            stage = i32(i % u32(2))
            if i + u32(1) != end:
                load_pair(smem, i32(1 - stage), x, i32(n0 + BLOCK_KV), place, e0, call)
                cp_async_commit()
            at = i32(tile.first + stage * tile.stage)
            qk.multiply(scores, q_frag, smem, q_place, at)  # scores [16, BLOCK_KV] = Q @ K.T
            last = i32(n0 + (BLOCK_KV - 1))
            whole = (last <= m0 + call.offset) & (last < place.columns)
            here = Place(b, h, place.m, i32(n0 + 2 * (lane % LANES)), place.rows, place.columns, row0, column0, whole)
            pairs.weigh(scores, sums, here, mine, x, call)
            pv.put(probs, scores)
            pv.add(acc, probs, smem, i32(at + tile.v_at))  # acc [16, BLOCK_V] += P @ V
            if pairs.counts(mine, call, m0, n0):
                leave_rest(scores, qk.size)
                pv.put(probs, scores)
                pv.add(acc, probs, smem, i32(at + tile.v_at))
            cp_async_wait_group(0)
            cuda.syncthreads()
            i, n0 = u32(i + u32(1)), i32(n0 + BLOCK_KV)

        if end == u32(0):
            cuda.syncthreads()  # results overwrite Q
        if not variant.masked:  # with a mask all pairs are multiplied anyway
            repair(acc, (x, before), (place, n_first, slot, i32(e0 + 2 * (lane % LANES))), mine, call)
        for half in range(2):
            m, inverse = i32(place.m + 8 * half), num.one
            if variant.normalized and call.normalize != 0:
                total = lanes.sum(sums[half])
                size = abs(total)
                if not size <= num.one:  # a NaN too
                    inverse = num.one / size
                if (call.sums != 0) & (m < rows) & (lane % LANES == 0) & (e0 == 0):
                    row_sum.data[start(row_sum, b, h, row0 + call.direction * m)] = total
            if variant.normalized and call.row_weighted != 0 and m < rows:
                inverse = weights.data[start(weights, b, h, row0 + call.direction * m)]
            for j in range(pv.size // 4):
                for e in range(2):
                    acc[4 * j + 2 * half + e] *= inverse
        results = out, start(out, b, h, row0), call.direction * out.strides[2], i32(call.Dv)
        output.store(floats, acc, i32(m0 + my_rows), e0, i32(rows), results)

    return retention_rows_sm80
