"""Norms on sm_90: blocks take one row after another, while the next rows are already on their way.

A block has `rows` rows at once, each shared by `row_threads` threads; or a cluster of blocks shares one row, each block
`share` of its columns. A warp of its own copies sets of rows into a ring of stages (cp.async.bulk), as far ahead as
there is room. w and b of a thread's columns stay in registers from row to row.

    1  h = x + residual to registers, the stage is free again
    2  rms_norm: sum(h * h) of every warp. layer_norm: sum(h) of every warp, and the sum of (h - its own mean)^2
    3  warps send theirs to every block of the cluster, and merge all of them              (st.async, one mbarrier)
           mean = sum(sums) / N,  squares = sum(their squares + columns * (their mean - mean)^2)
    4  y = (h - mean) * rstd * (w + offset) + b

Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450; merging in step 3: Chan et al. 1979.
Shared memory: stages * arrays * rows * row_threads * vectors * 16 bytes, and about 4 KiB. Registers:
vectors * 16 / itemsize numbers a thread for each of h, w and b, and about 40 more. Backward: ring_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...spec.meta import compute_dtype, itemsize
from ..backend import Kernel, builds, cuda, i32, i64, kernel, u64, verb
from ..tile import access, cluster_ctarank, lane_reductions, numbers, parts, ring, start_cluster, storage
from .variant import Variant, forward_types
from .verbs import inverse_root, pairs_sum, places, weights


@dataclass(frozen=True)
class RingConfig:
    """How rows are dealt to blocks of `row_threads * rows` threads and a warp that copies."""

    row_threads: int  # threads of a block that share a row: a power of two below 32, or a multiple of 32
    vectors: int  # 16-byte vectors of a row that each of them has
    rows: int  # of a block at once; 1 in a cluster
    stages: int
    cluster: int = 1  # blocks that share a row
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM
    w_shared: bool = False  # backward: w waits in shared memory, not in registers

    @property
    def readers(self) -> int:
        """Threads that do not copy."""
        return self.row_threads * self.rows

    @property
    def threads(self) -> int:
        return self.readers + 32

    def columns(self, dtype: str) -> int:
        """Most columns of a block."""
        return self.row_threads * self.vectors * storage(dtype).vector

    def shared_bytes(self, arrays: int, dtype: str) -> int:
        """For stages with rows of so many arrays of `dtype`, and w as numbers."""
        tile, numbers = self.rows * self.columns(dtype), self.rows * self.columns(dtype) * self.w_shared
        return self.stages * arrays * tile * itemsize(dtype) + numbers * itemsize(compute_dtype(dtype))


class Copies(NamedTuple):
    """How rows come into the stages. A stage has `rows` rows of each array; in it, a row has room for all columns."""

    clear: Callable[..., None]  # (tiles, width, tid): zeros behind the width columns of every row, by all threads
    rounds: Callable[..., int]  # (first, step, M): sets of rows, from row `first` on, `step` rows apart
    # (tiles, full, empty, x, second, third, first, step, M, sizes, begin, width): all of them, by one thread
    feed: Callable[..., None]


def copies(config: RingConfig, variant: Variant, arrays: int) -> Copies:
    """The verbs for this many arrays: x, second and third, as far as they are wanted, width columns from begin on."""
    stages, (locate, start) = ring(config.stages, config.readers // 32), places(variant.rank)
    acquire, copy = stages.acquire, stages.copy
    ARRAYS, ITEMSIZE, ROWS, RANK = arrays, itemsize(variant.dtype), config.rows, variant.rank
    COLUMNS, THREADS = config.columns(variant.dtype), config.threads
    TILE, ALL_ROWS = ROWS * COLUMNS, config.stages * arrays * config.rows
    MAY_BE_ONE = (variant.rank == 1) & (config.cluster == 1)

    @verb
    def clear(tiles, width, tid):
        for row in range(ALL_ROWS):
            for n in range(width + tid, COLUMNS, THREADS):
                tiles[row * COLUMNS + n] = 0

    @verb
    def rounds(first, step, M):
        return i32((M - first + step - 1) // step)

    @verb
    def copy_rows(tiles, at, x, place, first, count, sizes, begin, width, full, stage):
        if MAY_BE_ONE & (x.strides[0] == COLUMNS):
            copy(tiles, at, x.data, first * COLUMNS, count * (COLUMNS * ITEMSIZE), full, stage)
        else:
            for r in range(count):
                locate(place, first + r, sizes)
                copy(tiles, at + r * COLUMNS, x.data, start(place, x.strides) + begin, width * ITEMSIZE, full, stage)

    @verb
    def feed(tiles, full, empty, x, second, third, first, step, M, sizes, begin, width):
        place = cuda.local.array(RANK, i64)
        i, end = i32(0), rounds(first, step, M)
        while i < end:
            count = i32(min(M - first, i64(ROWS)))
            stage = acquire(full, empty, i, count * width * (ARRAYS * ITEMSIZE))
            at = stage * (ARRAYS * TILE)
            copy_rows(tiles, at, x, place, first, count, sizes, begin, width, full, stage)
            if ARRAYS > 1:
                copy_rows(tiles, at + TILE, second, place, first, count, sizes, begin, width, full, stage)
            if ARRAYS > 2:
                copy_rows(tiles, at + 2 * TILE, third, place, first, count, sizes, begin, width, full, stage)
            first += step
            i = i32(i + 1)

    return Copies(clear, rounds, feed)


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N columns."""
    kept = storage(variant.dtype)
    number, element, rounded, load_shared = kept.number, kept.element, kept.rounded, kept.load_shared
    vector, _, store = access(variant.dtype, True)
    load_w, load_b = (weights(variant.dtype, dtype, True) for dtype in (variant.w, variant.b))
    store_statistic = storage(compute_dtype(variant.dtype)).store
    locate, start = places(variant.rank)
    rsqrt = inverse_root(number)
    lanes_sum = lane_reductions(number, min(config.row_threads, 32)).sum
    all_lanes_sum = lane_reductions(number, 32).sum
    warps = max(config.row_threads // 32, 1)
    stages = ring(config.stages, config.readers // 32)
    init_ring, wait, release = stages.init, stages.wait, stages.release
    clear, rounds_of, feed = copies(config, variant, 1 + variant.added)
    meeting = parts(number, numbers(number).send_pair, warps, config.cluster, config.rows)
    init_parts, send, wait_parts = meeting.init, meeting.send, meeting.wait
    total_of = pairs_sum(number, warps * config.cluster)
    VECTOR, VECTORS, ROWS, ROW_THREADS = vector, config.vectors, config.rows, config.row_threads
    STEP = config.row_threads * vector  # columns between a thread's vectors
    STAGES, CLUSTER, WARPS, COPIER = config.stages, config.cluster, warps, config.readers // 32
    ELEMENTS, COLUMNS = vector * config.vectors, config.columns(variant.dtype)
    PARTS, PAIRS, TILE = warps * config.cluster, 4 * warps * config.cluster * config.rows, config.rows * COLUMNS
    CENTRED, ADDED, STATISTICS = variant.centred, variant.added, variant.statistics
    HAS_W, HAS_B, ARRAYS = variant.w is not None, variant.b is not None, 1 + variant.added
    WARP_COLUMNS, LANE_PARTS = min(config.row_threads, 32) * vector, -(-PARTS // 32)
    RANK, ZERO, ONE = variant.rank, number(0), number(1)

    @verb
    def columns_of(part, N, share):
        """Columns of a warp, number `part` among those that share a row."""
        rank, warp = part // WARPS, part % WARPS
        end = min(share, N - rank * share)
        count = i32(0)
        for v in range(VECTORS):
            count += max(min(end - (v * WARPS + warp) * WARP_COLUMNS, WARP_COLUMNS), 0)
        return number(count)

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share):
        tiles = cuda.shared.array(0, element, alignment=16)  # a stage: ROWS rows of x, then of the residual
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        begin = rank * share
        width = min(share, N - begin)
        if tid == 0:
            init_ring(full, empty)
            init_parts(bells)
        clear(tiles, width, tid)
        start_cluster()
        first = i64(cuda.blockIdx.x // CLUSTER) * ROWS
        step = cuda.gridDim.x // CLUSTER * ROWS

        if warp == COPIER:
            if lane == 0:
                feed(tiles, full, empty, x, residual, residual, first, step, M, sizes, begin, width)
        else:
            frag = cuda.local.array(ELEMENTS, number)  # my part of h[row]
            other = cuda.local.array(VECTOR, number)
            w_frag = cuda.local.array(ELEMENTS, number)
            b_frag = cuda.local.array(ELEMENTS, number)
            part_columns = cuda.local.array(LANE_PARTS, number)
            part_inverse = cuda.local.array(LANE_PARTS, number)
            place = cuda.local.array(RANK, i64)
            column = tid % ROW_THREADS * VECTOR
            left = i32(width - column)  # columns from my first one on
            first_at = i32(tid // ROW_THREADS * COLUMNS + column)  # in a stage
            inverse_N, my_inverse = ONE / number(N), ONE
            for v in range(VECTORS):
                n = i64(begin + column) + v * STEP
                if HAS_W:
                    load_w(w_frag, v * VECTOR, w, n, left > v * STEP)
                if HAS_B:
                    load_b(b_frag, v * VECTOR, b, n, left > v * STEP)
            if HAS_W:
                for c in range(ELEMENTS):
                    w_frag[c] += offset
            if CENTRED:
                my_inverse = ONE / max(columns_of(rank * WARPS + warp % WARPS, N, share), ONE)
                for k in range(LANE_PARTS):
                    part_columns[k] = columns_of(k * 32 + lane, N, share)
                    part_inverse[k] = ONE / max(part_columns[k], ONE)

            row = first + tid // ROW_THREADS
            rounds, i = rounds_of(first, step, M), i32(0)
            while i < rounds:
                locate(place, row, sizes)
                own = ROWS == 1 or row < M
                stage = wait(full, i)
                tile = stage * (ARRAYS * TILE) + first_at
                for v in range(VECTORS):
                    at = tile + v * STEP
                    load_shared(frag, v * VECTOR, tiles, at)
                    if ADDED:
                        load_shared(other, 0, tiles, at + TILE)
                        for c in range(VECTOR):
                            frag[v * VECTOR + c] = rounded(frag[v * VECTOR + c] + other[c])
                release(empty, stage)
                if ADDED:
                    summed_row = start(place, summed.strides) + (begin + column)
                    for v in range(VECTORS):
                        store(summed.data, summed_row + v * STEP, own & (left > v * STEP), frag, v * VECTOR)

                row_mean, total, squares = ZERO, ZERO, ZERO
                if CENTRED:
                    for c in range(ELEMENTS):
                        total += frag[c]
                    total = lanes_sum(total)
                    row_mean = total * my_inverse
                    for v in range(VECTORS):
                        inside = left > v * STEP
                        for c in range(v * VECTOR, (v + 1) * VECTOR):
                            apart = frag[c] - row_mean if inside else ZERO
                            squares += apart * apart
                else:
                    for c in range(ELEMENTS):
                        squares += frag[c] * frag[c]
                squares = lanes_sum(squares)
                if PARTS > 1:
                    send(pairs, bells, i, rank, warp, lane, squares, total)
                    found = wait_parts(bells, i)
                    squares = total_of(pairs, found, lane)
                    if CENTRED:
                        row_mean = total_of(pairs, found + 1, lane) * inverse_N
                        total = ZERO
                        for k in range(LANE_PARTS):
                            part = k * 32 + lane
                            if part < PARTS:
                                apart = pairs[found + 2 * part + 1] * part_inverse[k] - row_mean
                                total += part_columns[k] * apart * apart
                        squares += all_lanes_sum(total)
                row_rstd = rsqrt(squares * inverse_N + eps)

                y_row = start(place, y.strides) + (begin + column)
                for v in range(VECTORS):
                    for c in range(v * VECTOR, (v + 1) * VECTOR):
                        frag[c] = (frag[c] - row_mean) * row_rstd
                        if HAS_W:
                            frag[c] *= w_frag[c]
                        if HAS_B:
                            frag[c] += b_frag[c]
                    store(y.data, y_row + v * STEP, own & (left > v * STEP), frag, v * VECTOR)
                if STATISTICS:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if own & (column == 0) & (rank == 0):
                        store_statistic(rstd.data, start(place, rstd.strides), row_rstd)
                        if CENTRED:
                            store_statistic(mean.data, start(place, mean.strides), row_mean)
                row += step
                i = i32(i + 1)

    return norm_ring
