"""The gradient of norms on sm_90: as ring.py, with two or three arrays in a stage, and dw and db kept in registers.

    1  level = sum(g), along = sum(g * xhat) of every warp, g = dy * (w + offset), xhat = (x - mean) * rstd
    2  warps send theirs to every block of the cluster, and sum all of them                (st.async, one mbarrier)
    3  dx = rstd * (g - level / N - xhat * along / N) + dsummed;  dw += dy * xhat;  db += dy;  the stage is free
    4  the blocks' dw and db are summed by a second kernel (sums.py)

A row stays in its stage, and is read again in step 3. Papers as in ring.py. Shared memory: that of ring.py, and a row
of numbers where a block has several rows. Registers: vectors * 16 / itemsize numbers a thread for each of w, dw and db,
and about 60 more.
"""

from __future__ import annotations

from ...spec.meta import compute_dtype
from ..backend import Kernel, builds, cuda, i32, i64, kernel, u64, verb
from ..tile.numbers import numbers
from ..tile.ring import bar_sync, cluster_ctarank, parts, ring, start_cluster
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .staging import RingConfig, copies
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types
from .verbs import pair_sums, row_axes, weights

EVERYBODY = 15  # the barrier of all warps but the copying one; a row has number 1 + its place in the block


@builds
def build_backward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share).

    partials has room for `slots` clusters of blocks.
    """
    mem, number = storage(variant.dtype), storage(variant.dtype).number
    num, num_mem = numbers(number), storage(compute_dtype(variant.dtype))
    w_vec, axes = weights(variant.dtype, variant.w, True), row_axes(variant.rank)
    pipe, staging = ring(config.stages, config.readers // 32), copies(config, variant, 2 + variant.added)
    VECTOR, VECTORS, ROWS, ROW_THREADS = mem.vector, config.vectors, config.rows, config.row_threads
    STEP = ROW_THREADS * VECTOR  # columns between a thread's vectors
    STAGES, CLUSTER, READERS, COPIER = config.stages, config.cluster, config.readers, config.readers // 32
    ELEMENTS, COLUMNS, RANK = VECTOR * VECTORS, config.columns(variant.dtype), variant.rank
    TILE, ARRAYS = ROWS * COLUMNS, 2 + variant.added
    WARPS = max(ROW_THREADS // 32, 1)
    PARTS = WARPS * CLUSTER
    lanes, warps = lane_reductions(number, min(ROW_THREADS, 32)), pair_sums(number, PARTS)
    meeting = parts(number, num.send_pair, WARPS, CLUSTER, ROWS)
    PAIRS = 4 * meeting.size
    CENTRED, ADDED, HAS_W, DW, DB = variant.centred, variant.added, variant.w is not None, variant.dw, variant.db
    W_SHARED, W_FIRST = config.w_shared and HAS_W, config.stages_bytes(variant) * 8 // number.bitwidth
    DB_FIRST = variant.sums - 1

    @verb
    def meet():
        bar_sync(EVERYBODY, READERS)

    sums = partial_sums(variant.dtype, ROW_THREADS, VECTORS, ROWS, True, variant.sums, meet)
    SHARED = sums.size

    @kernel(*backward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share):
        tiles = cuda.shared.array(0, mem.element, alignment=16)  # a stage: ROWS rows of x, then of dy, then of dsummed
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        w_smem = cuda.shared.array(0, number, alignment=16)  # behind the stages: everybody's own w + offset
        shared = cuda.shared.array(SHARED, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        begin = rank * share
        width = min(share, N - begin)
        if tid == 0:
            pipe.init(full, empty)
            meeting.init(bells)
        staging.clear(tiles, width, tid)
        start_cluster()
        cluster, clusters = cuda.blockIdx.x // CLUSTER, cuda.gridDim.x // CLUSTER
        first, step = i64(cluster) * ROWS, clusters * ROWS

        if warp == COPIER:
            if lane == 0:
                staging.feed(tiles, full, empty, x, dy, dsummed, first, step, M, sizes, begin, width)
        else:
            x_frag = cuda.local.array(VECTOR, number)
            dy_frag = cuda.local.array(VECTOR, number)
            other = cuda.local.array(VECTOR, number)
            w_frag = cuda.local.array(ELEMENTS, number)
            dw_frag = cuda.local.array(ELEMENTS, number)
            db_frag = cuda.local.array(ELEMENTS, number)
            place = cuda.local.array(RANK, i64)
            column = tid % ROW_THREADS * VECTOR
            left = i32(width - column)  # columns from my first one on
            first_at = i32(tid // ROW_THREADS * COLUMNS + column)  # in a stage
            inverse_N = num.one / number(N)
            if HAS_W:
                for v in range(VECTORS):
                    w_vec.load(w_frag, v * VECTOR, w, i64(begin + column) + v * STEP, left > v * STEP)
                for c in range(ELEMENTS):
                    w_frag[c] += offset
            if W_SHARED:
                for c in range(0, ELEMENTS, num.vector):
                    num.store_vector(w_smem, W_FIRST + c * READERS + tid * num.vector, w_frag, c)

            row = first + tid // ROW_THREADS
            next_mean, next_rstd = num.zero, num.zero
            if row < M:
                axes.locate(place, row, sizes)
                next_rstd = num_mem.load(rstd.data, axes.start(place, rstd.strides))
                if CENTRED:
                    next_mean = num_mem.load(mean.data, axes.start(place, mean.strides))
            rounds, i, stage = staging.rounds(first, step, M), i32(0), i32(0)
            while i < rounds:
                for c in range(ELEMENTS):
                    dw_frag[c] = num.zero
                    db_frag[c] = num.zero
                end = i32(min(i + PIECE, rounds))
                more = i > 0
                while i < end:
                    if i > 0:
                        # of the row before; at its own end, sums would wait behind the branch
                        pipe.release(empty, stage)
                    row_mean, row_rstd = next_mean, next_rstd
                    if row + step < M:
                        axes.locate(place, row + step, sizes)
                        next_rstd = num_mem.load(rstd.data, axes.start(place, rstd.strides))
                        if CENTRED:
                            next_mean = num_mem.load(mean.data, axes.start(place, mean.strides))
                    own = ROWS == 1 or row < M

                    level, along = num.zero, num.zero
                    stage = pipe.wait(full, i)
                    tile = stage * (ARRAYS * TILE) + first_at
                    if own:  # else the stage holds an older row there
                        for v in range(VECTORS):
                            at = tile + v * STEP
                            mem.load_shared(x_frag, 0, tiles, at)
                            mem.load_shared(dy_frag, 0, tiles, at + TILE)
                            if W_SHARED:
                                for c in range(v * VECTOR, (v + 1) * VECTOR, num.vector):
                                    num_mem.load_shared(w_frag, c, w_smem, W_FIRST + c * READERS + tid * num.vector)
                            for c in range(VECTOR):
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                g = dy_frag[c] * w_frag[v * VECTOR + c] if HAS_W else dy_frag[c]
                                if CENTRED:
                                    level += g
                                along += g * xhat
                    along = lanes.sum(along)
                    if CENTRED:
                        level = lanes.sum(level)
                    if PARTS > 1:
                        meeting.send(pairs, bells, i, rank, warp, lane, along, level)
                        found = meeting.wait(bells, i)
                        along = warps.sum(pairs, found, lane)
                        if CENTRED:
                            level = warps.sum(pairs, found + 1, lane)
                    along *= inverse_N
                    level = level * inverse_N if CENTRED else num.zero

                    if own:
                        axes.locate(place, row, sizes)
                        dx_row = axes.start(place, dx.strides) + (begin + column)
                        for v in range(VECTORS):
                            at = tile + v * STEP
                            mem.load_shared(x_frag, 0, tiles, at)
                            mem.load_shared(dy_frag, 0, tiles, at + TILE)
                            if W_SHARED:
                                for c in range(v * VECTOR, (v + 1) * VECTOR, num.vector):
                                    num_mem.load_shared(w_frag, c, w_smem, W_FIRST + c * READERS + tid * num.vector)
                            if ADDED:
                                mem.load_shared(other, 0, tiles, at + 2 * TILE)
                            for c in range(VECTOR):
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                g = dy_frag[c] * w_frag[v * VECTOR + c] if HAS_W else dy_frag[c]
                                if DW:
                                    dw_frag[v * VECTOR + c] += dy_frag[c] * xhat
                                if DB:
                                    db_frag[v * VECTOR + c] += dy_frag[c]
                                x_frag[c] = (g - level - xhat * along) * row_rstd
                                if ADDED:
                                    x_frag[c] += other[c]
                            mem.store_vector(dx.data, dx_row + v * STEP, left > v * STEP, x_frag, 0)
                    row += step
                    i = i32(i + 1)

                if DW:
                    sums.write(partials, i64(cluster), N, begin, width, dw_frag, shared, tid, more)
                if DB:
                    sums.write(partials, DB_FIRST * slots + cluster, N, begin, width, db_frag, shared, tid, more)
            for slot in range(i64(clusters + cluster), slots, i64(clusters)):
                sums.clear(partials, slot, slots, N, begin, width, tid)

    return norm_ring_backward
