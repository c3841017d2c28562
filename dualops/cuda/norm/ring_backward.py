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
from ..tile import access, bar_sync, cluster_ctarank, lane_reductions, numbers, parts, ring, start_cluster, storage
from .staging import RingConfig, copies
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types
from .verbs import pairs_sum, places, weights

EVERYBODY = 15  # the barrier of all warps but the copying one; a row has number 1 + its place in the block


@builds
def build_backward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share).

    partials has room for `slots` clusters of blocks.
    """
    kept = storage(variant.dtype)
    number, element, load_shared = kept.number, kept.element, kept.load_shared
    vector, _, store = access(variant.dtype, True)
    computed = compute_dtype(variant.dtype)
    load_w = weights(variant.dtype, variant.w, True)
    load_statistic, load_number = storage(computed).load, storage(computed).load_shared
    store_number = numbers(number).store_vector
    locate, start = places(variant.rank)
    lanes_sum = lane_reductions(number, min(config.row_threads, 32)).sum
    warps = max(config.row_threads // 32, 1)
    stages = ring(config.stages, config.readers // 32)
    init_ring, wait, release = stages.init, stages.wait, stages.release
    clear_tiles, rounds_of, feed = copies(config, variant, 2 + variant.added)
    meeting = parts(number, numbers(number).send_pair, warps, config.cluster, config.rows)
    init_parts, send, wait_parts = meeting.init, meeting.send, meeting.wait
    total_of = pairs_sum(number, warps * config.cluster)
    VECTOR, VECTORS, ROWS, ROW_THREADS = vector, config.vectors, config.rows, config.row_threads
    STEP = config.row_threads * vector  # columns between a thread's vectors
    STAGES, CLUSTER, READERS, COPIER = config.stages, config.cluster, config.readers, config.readers // 32
    ELEMENTS, COLUMNS = vector * config.vectors, config.columns(variant.dtype)
    PARTS, PAIRS, TILE = warps * config.cluster, 4 * warps * config.cluster * config.rows, config.rows * COLUMNS
    CENTRED, ADDED, HAS_W, DW, DB = variant.centred, variant.added, variant.w is not None, variant.dw, variant.db
    DB_FIRST, ARRAYS, RANK = variant.sums - 1, 2 + variant.added, variant.rank
    W_SHARED, W_PART = config.w_shared and variant.w is not None, numbers(number).vector
    W_FIRST = config.stages_bytes(variant) * 8 // number.bitwidth
    ZERO, ONE = number(0), number(1)

    @verb
    def meet():
        bar_sync(EVERYBODY, READERS)

    sizes = config.row_threads, config.vectors, config.rows
    partial = partial_sums(variant.dtype, *sizes, True, variant.sums, meet)
    write, clear, SHARED = partial.write, partial.clear, partial.size

    @kernel(*backward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share):
        tiles = cuda.shared.array(0, element, alignment=16)  # a stage: ROWS rows of x, then of dy, then of dsummed
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
            init_ring(full, empty)
            init_parts(bells)
        clear_tiles(tiles, width, tid)
        start_cluster()
        cluster, clusters = cuda.blockIdx.x // CLUSTER, cuda.gridDim.x // CLUSTER
        first, step = i64(cluster) * ROWS, clusters * ROWS

        if warp == COPIER:
            if lane == 0:
                feed(tiles, full, empty, x, dy, dsummed, first, step, M, sizes, begin, width)
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
            inverse_N = ONE / number(N)
            if HAS_W:
                for v in range(VECTORS):
                    load_w(w_frag, v * VECTOR, w, i64(begin + column) + v * STEP, left > v * STEP)
                for c in range(ELEMENTS):
                    w_frag[c] += offset
            if W_SHARED:
                for c in range(0, ELEMENTS, W_PART):
                    store_number(w_smem, W_FIRST + c * READERS + tid * W_PART, w_frag, c)

            row = first + tid // ROW_THREADS
            next_mean, next_rstd = ZERO, ZERO
            if row < M:
                locate(place, row, sizes)
                next_rstd = load_statistic(rstd.data, start(place, rstd.strides))
                if CENTRED:
                    next_mean = load_statistic(mean.data, start(place, mean.strides))
            rounds, i, stage = rounds_of(first, step, M), i32(0), i32(0)
            while i < rounds:
                for c in range(ELEMENTS):
                    dw_frag[c] = ZERO
                    db_frag[c] = ZERO
                end = i32(min(i + PIECE, rounds))
                more = i > 0
                while i < end:
                    if i > 0:
                        release(empty, stage)  # of the row before; at its own end, sums would wait behind the branch
                    row_mean, row_rstd = next_mean, next_rstd
                    if row + step < M:
                        locate(place, row + step, sizes)
                        next_rstd = load_statistic(rstd.data, start(place, rstd.strides))
                        if CENTRED:
                            next_mean = load_statistic(mean.data, start(place, mean.strides))
                    own = ROWS == 1 or row < M

                    level, along = ZERO, ZERO
                    stage = wait(full, i)
                    tile = stage * (ARRAYS * TILE) + first_at
                    if own:  # else the stage holds an older row there
                        for v in range(VECTORS):
                            at = tile + v * STEP
                            load_shared(x_frag, 0, tiles, at)
                            load_shared(dy_frag, 0, tiles, at + TILE)
                            if W_SHARED:
                                for c in range(v * VECTOR, (v + 1) * VECTOR, W_PART):
                                    load_number(w_frag, c, w_smem, W_FIRST + c * READERS + tid * W_PART)
                            for c in range(VECTOR):
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                g = dy_frag[c] * w_frag[v * VECTOR + c] if HAS_W else dy_frag[c]
                                if CENTRED:
                                    level += g
                                along += g * xhat
                    along = lanes_sum(along)
                    if CENTRED:
                        level = lanes_sum(level)
                    if PARTS > 1:
                        send(pairs, bells, i, rank, warp, lane, along, level)
                        found = wait_parts(bells, i)
                        along = total_of(pairs, found, lane)
                        if CENTRED:
                            level = total_of(pairs, found + 1, lane)
                    along *= inverse_N
                    level = level * inverse_N if CENTRED else ZERO

                    if own:
                        locate(place, row, sizes)
                        dx_row = start(place, dx.strides) + (begin + column)
                        for v in range(VECTORS):
                            at = tile + v * STEP
                            load_shared(x_frag, 0, tiles, at)
                            load_shared(dy_frag, 0, tiles, at + TILE)
                            if W_SHARED:
                                for c in range(v * VECTOR, (v + 1) * VECTOR, W_PART):
                                    load_number(w_frag, c, w_smem, W_FIRST + c * READERS + tid * W_PART)
                            if ADDED:
                                load_shared(other, 0, tiles, at + 2 * TILE)
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
                            store(dx.data, dx_row + v * STEP, left > v * STEP, x_frag, 0)
                    row += step
                    i = i32(i + 1)

                if DW:
                    write(partials, i64(cluster), N, begin, width, dw_frag, shared, tid, more)
                if DB:
                    write(partials, DB_FIRST * slots + cluster, N, begin, width, db_frag, shared, tid, more)
            for slot in range(i64(clusters + cluster), slots, i64(clusters)):
                clear(partials, slot, slots, N, begin, width, tid)

    return norm_ring_backward
