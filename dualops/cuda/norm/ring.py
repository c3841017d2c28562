"""Norms on sm_90: blocks take one row after another, while the next rows are already on their way.

A block has `rows` rows at once, each shared by `row_threads` threads; or a cluster of blocks shares one row, each block
`share` of its columns. A warp of its own copies sets of rows into a ring of stages (cp.async.bulk), as far ahead as
there is room. w and b of a thread's columns stay in registers from row to row, or in shared memory (`w_shared`).

    1  h = x + residual to registers
    2  rms_norm: sum(h * h) of every warp. layer_norm: sum(h) of every warp, and the sum of (h - its own mean)^2
    3  the stage is free; warps send theirs to every block of the cluster, and merge all   (st.async, one mbarrier)
           mean = sum(sums) / N,  squares = sum(their squares + columns * (their mean - mean)^2)
    4  y = (h - mean) * rstd * (w + offset) + b

Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450; merging in step 3: Chan et al. 1979.
Shared memory: stages * arrays * rows * row_threads * vectors * 16 bytes, w and b, and about 4 KiB. Registers:
vectors * 16 / itemsize numbers a thread for each of h, w and b, and about 40 more. Backward: ring_backward.py.
"""

from __future__ import annotations

from math import sqrt

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, u64, verb
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, parts, ring, start_cluster
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .staging import RingConfig, copies, shared_weights
from .variant import Variant, forward_types
from .verbs import pair_sums, row_axes, weights


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N columns."""
    mem, number = storage(variant.dtype), storage(variant.dtype).number
    num, num_mem = numbers(number), storage(compute_dtype(variant.dtype))
    axes, w_and_b = row_axes(variant.rank), shared_weights(config, variant)
    w_vec, b_vec = weights(variant.dtype, variant.w, True), weights(variant.dtype, variant.b, True)
    pipe, staging = ring(config.stages, config.readers // 32), copies(config, variant, 1 + variant.added)
    lanes, all_lanes = lane_reductions(number, min(config.row_threads, 32)), lane_reductions(number, 32)
    VECTOR, VECTORS, ROWS, ROW_THREADS = mem.vector, config.vectors, config.rows, config.row_threads
    STEP = ROW_THREADS * VECTOR  # columns between a thread's vectors
    STAGES, CLUSTER, COPIER, ARRAYS = config.stages, config.cluster, config.readers // 32, 1 + variant.added
    ELEMENTS, COLUMNS, RANK = VECTOR * VECTORS, config.columns(variant.dtype), variant.rank
    TILE, WARP_COLUMNS = ROWS * COLUMNS, min(ROW_THREADS, 32) * VECTOR
    WARPS = max(ROW_THREADS // 32, 1)
    PARTS = WARPS * CLUSTER
    meeting, warps = parts(number, num.send_pair, WARPS, CLUSTER, ROWS), pair_sums(number, PARTS)
    PAIRS, LANE_PARTS = 4 * meeting.size, -(-PARTS // 32)
    CENTRED, ADDED, STATISTICS = variant.centred, variant.added, variant.statistics
    HAS_W, HAS_B = variant.w is not None, variant.b is not None
    KEPT_W, KEPT_B = HAS_W and not config.w_shared, HAS_B and not config.w_shared  # in registers

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
        tiles = cuda.shared.array(0, mem.element, alignment=16)  # a stage: ROWS rows of x, then of the residual
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
        bells = cuda.shared.array(2, u64)
        w_smem = cuda.shared.array(0, w_and_b.w_element, alignment=16)  # behind the stages, if w and b are kept there
        b_smem = cuda.shared.array(0, w_and_b.b_element, alignment=16)
        weights_bell = cuda.shared.array(1, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        begin = rank * share
        width = min(share, N - begin)
        if tid == 0:
            pipe.init(full, empty)
            meeting.init(bells)
            w_and_b.init(weights_bell)
        staging.clear(tiles, width, tid)
        start_cluster()
        first = i64(cuda.blockIdx.x // CLUSTER) * ROWS
        step = cuda.gridDim.x // CLUSTER * ROWS

        if warp == COPIER:
            if lane == 0:
                w_and_b.copy(w_smem, b_smem, w, b, begin, width, weights_bell)
                staging.feed(tiles, full, empty, x, residual, residual, first, step, M, sizes, begin, width)
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
            inverse_N, my_inverse = num.one / number(N), num.one
            w_and_b.wait(weights_bell)
            for v in range(VECTORS):
                n = i64(begin + column) + v * STEP
                if KEPT_W:
                    w_vec.load(w_frag, v * VECTOR, w, n, left > v * STEP)
                if KEPT_B:
                    b_vec.load(b_frag, v * VECTOR, b, n, left > v * STEP)
            if KEPT_W:
                for c in range(ELEMENTS):
                    w_frag[c] += offset
            if CENTRED:
                my_inverse = num.one / max(columns_of(rank * WARPS + warp % WARPS, N, share), num.one)
                for k in range(LANE_PARTS):
                    part_columns[k] = columns_of(k * 32 + lane, N, share)
                    part_inverse[k] = num.one / max(part_columns[k], num.one)

            row = first + tid // ROW_THREADS
            rounds, i = staging.rounds(first, step, M), i32(0)
            while i < rounds:
                axes.locate(place, row, sizes)
                own = ROWS == 1 or row < M
                stage = pipe.wait(full, i)
                tile = stage * (ARRAYS * TILE) + first_at
                for v in range(VECTORS):
                    at = tile + v * STEP
                    mem.load_shared(frag, v * VECTOR, tiles, at)
                    if ADDED:
                        mem.load_shared(other, 0, tiles, at + TILE)
                        for c in range(VECTOR):
                            frag[v * VECTOR + c] = mem.rounded(frag[v * VECTOR + c] + other[c])
                if ADDED:
                    summed_row = axes.start(place, summed.strides) + (begin + column)
                    for v in range(VECTORS):
                        mem.store_vector(summed.data, summed_row + v * STEP, own & (left > v * STEP), frag, v * VECTOR)

                row_mean, total, squares = num.zero, num.zero, num.zero
                if CENTRED:
                    for v in range(VECTORS):
                        few = num.zero  # a vector's own sum, so that no chain of additions is long
                        for c in range(v * VECTOR, (v + 1) * VECTOR):
                            few += frag[c]
                        total += few
                    total = lanes.sum(total)
                    row_mean = total * my_inverse
                    for v in range(VECTORS):
                        few = num.zero
                        for c in range(v * VECTOR, (v + 1) * VECTOR):
                            apart = frag[c] - row_mean
                            few += apart * apart
                        squares += few if left > v * STEP else num.zero
                else:
                    for v in range(VECTORS):
                        few = num.zero
                        for c in range(v * VECTOR, (v + 1) * VECTOR):
                            few += frag[c] * frag[c]
                        squares += few
                squares = lanes.sum(squares)
                if PARTS > 1:
                    meeting.send(pairs, bells, i, rank, warp, lane, squares, total)
                pipe.release(empty, stage)  # not before: it waits for all loads, which sums overlap with
                if PARTS > 1:
                    found = meeting.wait(bells, i)
                    squares = warps.sum(pairs, found, lane)
                    if CENTRED:
                        row_mean = warps.sum(pairs, found + 1, lane) * inverse_N
                        total = num.zero
                        for k in range(LANE_PARTS):
                            part = k * 32 + lane
                            if part < PARTS:
                                apart = pairs[found + 2 * part + 1] * part_inverse[k] - row_mean
                                total += part_columns[k] * apart * apart
                        squares += all_lanes.sum(total)
                row_rstd = num.one / number(sqrt(squares * inverse_N + eps))

                y_row = axes.start(place, y.strides) + (begin + column)
                for v in range(VECTORS):
                    w_and_b.recall_w(w_frag, v * VECTOR, w_smem, column + v * STEP, offset)
                    w_and_b.recall_b(b_frag, v * VECTOR, b_smem, column + v * STEP)
                    for c in range(v * VECTOR, (v + 1) * VECTOR):
                        frag[c] = (frag[c] - row_mean) * row_rstd
                        if HAS_W:
                            frag[c] *= w_frag[c]
                        if HAS_B:
                            frag[c] += b_frag[c]
                    mem.store_vector(y.data, y_row + v * STEP, own & (left > v * STEP), frag, v * VECTOR)
                if STATISTICS:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if own & (column == 0) & (rank == 0):
                        num_mem.store(rstd.data, axes.start(place, rstd.strides), row_rstd)
                        if CENTRED:
                            num_mem.store(mean.data, axes.start(place, mean.strides), row_mean)
                row += step
                i = i32(i + 1)

    return norm_ring
