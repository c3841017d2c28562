"""Where the sums of a tile of a bias go: to dbias, or, of parts of them, to float32 memory, whence a second kernel adds
them.

A bias that has one row, or one column, for all gets the sum of a tile's. Columns are summed by a thread, then by the
four lanes that share a row; rows by a thread, then by the eight lanes that share a column: what each warp finds is a
part of its own, so that no warp waits for another.
"""

from __future__ import annotations

from collections.abc import Callable

from ...backend import Kernel, Namespace, builds, cuda, f32, i32, i64, kernel, verb
from ...tile.numbers import numbers
from ...tile.rows import FULL_WARP, lane_reductions
from ...tile.softmax_rows import LANES
from ...tile.storage import storage
from ...tile.unrolled import one_after_another
from ...tile.warpgroup import ROWS
from ...views import strided
from ..fragment_places import my_column, my_row
from .bias_walk import Broadcast

THREADS = 256
PLACES = 5  # strides: part, batch, head, query, key


class BiasSums(Namespace):
    """The verb, by all threads of the warpgroups that multiply."""

    store: Callable[..., None]  # (to, totals, part, extent): `to` has PLACES strides


def bias_sums(dtype: str, size: int, consumers: int, one: Broadcast) -> BiasSums:
    """For so many totals of a thread, to an array of this dtype."""
    mem, num, quads, warps = storage(dtype), numbers(f32), size // 4, 4 * consumers
    row_lanes, warp_lanes = lane_reductions(f32, LANES), lane_reductions(f32, 32)
    ONE_ROW = one.row

    @verb
    def my_part(part):
        return i32(part.piece * warps + i32(cuda.threadIdx.x // 32)) if ONE_ROW else part.piece

    @verb
    def start(to, part):
        return i64(my_part(part)) * to.strides[0] + i64(part.b) * to.strides[1] + i64(part.h) * to.strides[2]

    @verb
    def first_row(part):
        return i32(part.m0 + i32(cuda.threadIdx.x // 128) * ROWS + my_row())

    def stored(j: int, h: int) -> Callable[..., None]:
        @verb
        def store(to, totals, part, extent):
            m = i32(first_row(part) + 8 * h)
            for e in range(2):
                n = i32(part.n0 + my_column() + 8 * j + e)
                if (m < extent.Sq_bias) & (n < extent.Sk_bias):
                    at = start(to, part) + i64(m) * to.strides[3] + i64(n) * to.strides[4]
                    mem.store(to.data, at, totals[4 * j + 2 * h + e])

        return store

    def sum_of_row(h: int) -> Callable[..., None]:
        @verb
        def store(to, totals, part, extent):
            m, total = i32(first_row(part) + 8 * h), totals[2 * h] + totals[2 * h + 1]
            for j in range(1, quads):
                total += totals[4 * j + 2 * h] + totals[4 * j + 2 * h + 1]
            total = row_lanes.sum(total)
            if (m < extent.Sq_bias) & (cuda.threadIdx.x % LANES == 0):
                mem.store(to.data, start(to, part) + i64(m) * to.strides[3], total)

        return store

    def sum_of_column(j: int, e: int) -> Callable[..., None]:
        @verb
        def store(to, totals, part, extent):
            n, total = i32(part.n0 + my_column() + 8 * j + e), totals[4 * j + e] + totals[4 * j + 2 + e]
            for step in range(3):
                total += num.shuffle(total, LANES << step, FULL_WARP)
            if (n < extent.Sk_bias) & (cuda.threadIdx.x % 32 < LANES):
                mem.store(to.data, start(to, part) + i64(n) * to.strides[4], total)

        return store

    @verb
    def sum_of_all(to, totals, part, extent):
        total = totals[0] + totals[1]
        for e in range(1, size // 2):
            total += totals[2 * e] + totals[2 * e + 1]
        total = warp_lanes.sum(total)
        if cuda.threadIdx.x % 32 == 0:
            mem.store(to.data, start(to, part), total)

    if one.row and one.column:
        return BiasSums(store=sum_of_all)
    if one.column:
        return BiasSums(store=one_after_another([sum_of_row(h) for h in range(2)]))
    of_pairs = sum_of_column if one.row else stored
    return BiasSums(store=one_after_another([of_pairs(j, second) for j in range(quads) for second in range(2)]))


@builds
def build_dbias_sum(dtype: str, lanes: int) -> Kernel:
    """flash_attention_dbias_sum(dbias, parts, count, size, H, Sq, Sk): of `size` numbers [B, H, Sq, Sk] the sums of as
    many as there are parts.

    A number has so many lanes of a warp, which take turns to add a part each (compensated), in ascending order, and
    meet in a tree.
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
