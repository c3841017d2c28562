"""dS in registers, for dbias; and the sums of a tile of the bias: to dbias, or as parts to float32 memory, which a
second kernel adds.

    P = exp(scores - lse);  total += P * (weight * dP - delta)

Rows are queries. A bias is added after all options that have slopes, so its slope is 1. Masked scores are left out,
whatever dP and P are: 0 * NaN is NaN. So is a score of -inf, but not in a row that is NaN.

A bias with one row or one column gets the sum of a tile's. Columns are summed by a thread, then by the four lanes that
share a row; rows by a thread, then by the eight lanes that share a column. Each warp's result is a part of its own, so
that no warp waits for another.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, i64, kernel, members, noun, verb
from ...launch.views import strided
from ...tile.numbers import LOG2_E, numbers
from ...tile.rows import FULL_WARP, lane_reductions, transposed, vote_any
from ...tile.softmax_rows import LANES, ROWS as THREAD_ROWS
from ...tile.storage import storage
from ...tile.unrolled import one_after_another, unrolled
from ...tile.warpgroup import ROWS
from ..saved_lse import exponent_less, is_large, lowered
from ..score_coords import is_marked, my_column, my_row
from .bias_tile_scheduler import Broadcast

MASKED = -1  # instead of P
GREATEST = 3.4028234663852886e38  # finite float32


@noun
def gradient_of_bias(size: int) -> Members:
    """The verbs of tiles with `size` scores of a thread, in rows r and r + 8. base, lse and delta: arrays of two
    numbers. Finished scores are marked where a mask hides them (`score_coords.mark`).
    """
    num, LOG2, quads, NOT_THERE, MOST = numbers(f32), f32(LOG2_E), size // 4, f32(MASKED), f32(GREATEST)

    @verb
    def clear(totals):
        for e in range(size):
            totals[e] = num.zero

    @verb
    def bases(base, lse):
        """Fill base with lse, lowered (`saved_lse`)."""
        for h in range(THREAD_ROWS):
            base[h] = lowered(lse[h])

    @verb
    def all_count(scores, where, base):
        """Return whether all of a warp's finished scores count: none is masked or beyond the last query, and no lse is
        large. Products of two scores are added and tested, since they are infinite or NaN if a score is.
        """
        upper, lower = num.zero, num.zero
        for j in range(quads):
            upper += scores[4 * j] * scores[4 * j + 1]
            lower += scores[4 * j + 2] * scores[4 * j + 3]
        finite = (abs(upper) <= MOST) & (abs(lower) <= MOST)
        there = where.m0 + my_row() + 8 < where.Sq
        usual = not is_large(base[0]) and not is_large(base[1])
        return not vote_any(i32(not (finite & there & usual)), FULL_WARP)

    @verb
    def _exponentials(scores, base):
        upper, lower = base[0] * LOG2, base[1] * LOG2
        for j in range(quads):
            for e in range(4):
                scores[4 * j + e] = num.exp2(scores[4 * j + e] * LOG2 - (upper if e < 2 else lower))

    @verb
    def _add_all(totals, probs, d_probs, delta):
        for j in range(quads):
            for e in range(4):
                totals[4 * j + e] += probs[4 * j + e] * (d_probs[4 * j + e] - delta[e // 2])

    @unrolled(range(THREAD_ROWS))
    def _probabilities(scores, where, base, h):
        there = where.m0 + my_row() + 8 * h < where.Sq
        for j in range(quads):
            for e in range(2):
                score = scores[4 * j + 2 * h + e]
                prob = num.exp2(exponent_less(score, base[h]))
                # a NaN row makes all keys that it sees NaN
                counts = (score != num.minus_inf) | (prob != num.zero)
                scores[4 * j + 2 * h + e] = prob if counts & (not is_marked(score)) & there else NOT_THERE

    @unrolled(range(THREAD_ROWS))
    def _add_counted(totals, probs, d_probs, delta, h):
        for j in range(quads):
            for e in range(2):
                i = 4 * j + 2 * h + e
                total = totals[i] + probs[i] * (d_probs[i] - delta[h])
                totals[i] = totals[i] if probs[i] < num.zero else total

    @verb
    def probabilities(scores, where, base, all_count):
        """Turn finished scores into P, or MASKED where they do not count."""
        if all_count:
            _exponentials(scores, base)
        else:
            _probabilities(scores, where, base)

    @verb
    def add(totals, probs, d_probs, delta, all_count):
        if all_count:
            _add_all(totals, probs, d_probs, delta)
        else:
            _add_counted(totals, probs, d_probs, delta)

    return locals()


THREADS = 256
GROUP = 2  # quads of totals whose loop the compiler unrolls
PLACES = 5  # strides: part, batch, head, query, key


@noun
def bias_sums(dtype: str, size: int, consumers: int, one: Broadcast, *, vectors: bool) -> Members:
    """The verb that stores `size` totals of a thread in an array of this dtype; by all threads that multiply. vectors:
    eight neighbours may be stored at once.
    """
    mem, num, quads, warps = storage(dtype), numbers(f32), size // 4, 4 * consumers
    row_lanes, warp_lanes, transpose = lane_reductions(f32, LANES), lane_reductions(f32, 32), transposed(f32)
    ONE_ROW, STEP = one.row, mem.vector

    @verb
    def _my_part(part):
        return i32(part.piece * warps + i32(cuda.threadIdx.x // 32)) if ONE_ROW else part.piece

    @verb
    def _start(to, part):
        return i64(_my_part(part)) * to.strides[0] + i64(part.b) * to.strides[1] + i64(part.h) * to.strides[2]

    @verb
    def _first_row(part):
        return i32(part.m0 + i32(cuda.threadIdx.x // 128) * ROWS + my_row())

    def stored(first: int, h: int) -> Callable[..., None]:
        END = min(first + GROUP, quads)

        @verb
        def store(to, totals, rows, columns):
            for j in range(first, END):
                for e in range(2):
                    n = i32(columns[0] + 8 * j + e)
                    if rows[2 + h] & (n < columns[1]):
                        mem.store(to.data, rows[h] + i64(n) * to.strides[4], totals[4 * j + 2 * h + e])

        return store

    def stored_in_vectors(j: int, h: int) -> Callable[..., None]:
        @verb
        def store(to, totals, rows, columns):
            near = cuda.local.array(8, f32)
            at = 4 * j + 2 * h
            near[0], near[2], near[4], near[6] = transpose(totals[at], totals[at + 4], totals[at + 8], totals[at + 12])
            near[1], near[3], near[5], near[7] = transpose(
                totals[at + 1], totals[at + 5], totals[at + 9], totals[at + 13]
            )
            n = i32(columns[0] + 8 * j + 3 * my_column())  # my_column is twice the lane's number
            keep = i32(rows[2 + h] & (n < columns[1]))
            for e in range(0, 8, STEP):
                mem.store_vector(to.data, rows[h] + i64(n + e), keep, near, e)

        return store

    if vectors:
        store_all = one_after_another([stored_in_vectors(j, h) for j in range(0, quads, 4) for h in range(2)])
    else:
        store_all = one_after_another([stored(j, h) for j in range(0, quads, GROUP) for h in range(2)])

    @verb
    def _store_tile(to, totals, part, extent):
        upper, first = _first_row(part), _start(to, part)
        lower = i32(upper + 8)
        places = first + i64(upper) * to.strides[3], first + i64(lower) * to.strides[3]
        rows = (places[0], places[1], upper < extent.Sq_bias, lower < extent.Sq_bias)
        store_all(to, totals, rows, (i32(part.n0 + my_column()), extent.Sk_bias))

    @unrolled(range(2))
    def _sums_of_rows(to, totals, part, extent, h):
        m, total = i32(_first_row(part) + 8 * h), totals[2 * h] + totals[2 * h + 1]
        for j in range(1, quads):
            total += totals[4 * j + 2 * h] + totals[4 * j + 2 * h + 1]
        total = row_lanes.sum(total)
        if (m < extent.Sq_bias) & (cuda.threadIdx.x % LANES == 0):
            mem.store(to.data, _start(to, part) + i64(m) * to.strides[3], total)

    @unrolled((first, min(first + GROUP, quads)) for first in range(0, quads, GROUP))
    def _sums_of_columns(to, totals, part, extent, first, end):
        for j in range(first, end):
            for e in range(2):
                n, total = i32(part.n0 + my_column() + 8 * j + e), totals[4 * j + e] + totals[4 * j + 2 + e]
                for step in range(3):
                    total += num.shuffle(total, LANES << step, FULL_WARP)
                if (n < extent.Sk_bias) & (cuda.threadIdx.x % 32 < LANES):
                    mem.store(to.data, _start(to, part) + i64(n) * to.strides[4], total)

    @verb
    def _sum_of_all(to, totals, part, extent):
        total = totals[0] + totals[1]
        for e in range(1, size // 2):
            total += totals[2 * e] + totals[2 * e + 1]
        total = warp_lanes.sum(total)
        if cuda.threadIdx.x % 32 == 0:
            mem.store(to.data, _start(to, part), total)

    stores = (_store_tile, _sums_of_rows), (_sums_of_columns, _sum_of_all)
    return members(
        locals(),
        store=stores[one.row][one.column],  # (to, totals, part, extent): `to` has PLACES strides
    )


@builds
def build_dbias_sum(dtype: str, lanes: int) -> Kernel:
    """flash_attention_dbias_sum(dbias, parts, count, size, H, Sq, Sk): `size` numbers [B, H, Sq, Sk], each the sum of
    `count` parts.

    A number has `lanes` lanes of a warp. They take turns to add parts in ascending order (compensated), then meet in a
    tree.
    """
    mem, num, meet = storage(dtype), numbers(f32), lane_reductions(f32, lanes)

    @kernel(strided(dtype, PLACES), strided("float32", PLACES), i32, i64, *[i64] * 3, threads=THREADS)
    def flash_attention_dbias_sum(dbias, parts, count, size, H, Sq, Sk):
        thread = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        place, lane = thread // lanes, i32(thread % lanes)
        n, m, head = place % Sk, place // Sk % Sq, place // Sk // Sq
        b, h = head // H, head % H
        total, rest = num.zero, num.zero
        if place < size:
            own = b * parts.strides[1] + h * parts.strides[2] + m * parts.strides[3] + n * parts.strides[4]
            for part in range(lane, count, lanes):
                total, rest = num.add_compensated(total, rest, parts.data[own + part * parts.strides[0]])
        total = meet.sum(total)
        if (place < size) & (lane == 0):
            to = b * dbias.strides[1] + h * dbias.strides[2] + m * dbias.strides[3] + n * dbias.strides[4]
            mem.store(dbias.data, to, total)

    return flash_attention_dbias_sum
