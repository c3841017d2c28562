"""Norms of the longest rows on sm_90: a row stays in shared memory, as far as there is room, until it is written.

A cluster of blocks takes one row after another, each block `share` of its columns, cut into chunks. A warp of its own
copies chunks into a ring of stages (cp.async.bulk). The first chunks of a share, for which there is no room between the
two readings, are copied once more, and found in L2 as a rule (tile/chunk_order.py).

    1  for each chunk, h = x + residual. rms_norm: a thread's sum of h * h. layer_norm: its sum of h, and of
       (h - its own mean)^2, chunk after chunk
    2  warps merge their threads' and send theirs to every block of the cluster, as in ring.py (st.async, one mbarrier)
    3  for each chunk again: y = (h - mean) * rstd * (w + offset) + b; the stage is free

w and b come from L2, row after row: what they would take of shared memory is the row's. Papers as in ring.py.
Shared memory: stages * arrays * chunk * itemsize, and about 4 KiB. Registers: those of a chunk, and about 60.
"""

from __future__ import annotations

from ..backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.chunk_order import chunk_order
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, ring, start_cluster
from ..tile.storage import storage
from .merging import merged_means
from .staging import StagesConfig
from .variant import Variant, forward_types
from .verbs import Columns, cluster_sums, norm_axes, weights


@builds
def build_forward(config: StagesConfig, variant: Variant) -> Kernel:
    """norm_ring_stages(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    axes, w_and_b = norm_axes(variant), weights(variant, True)
    pipe = ring(config.staged(variant), config.row_warps)
    order = chunk_order(pipe.columns, config.kept)
    group = cluster_sums(mem.number, config.row_threads, 1, config.cluster)
    merging = merged_means(config, variant)
    ELEMENTS, STEP = config.vectors * mem.vector, config.row_threads * mem.vector

    @verb
    def feed(smem, columns, row, step, M, sizes, x, residual):
        planned, place, i = order.plan(columns.width), axes.place(), i32(0)
        while row < M:
            axes.locate(place, row, sizes)
            x_row, residual_row = axes.start(place, x) + columns.begin, axes.start(place, residual) + columns.begin
            for k in range(planned.chunks + planned.again):
                at = order.copied(planned, k) * pipe.columns
                filling = pipe.acquire(smem, i, 1, min(pipe.columns, columns.width - at))
                pipe.copy(filling, 0, 0, x.data, x_row + at)
                if variant.added:
                    pipe.copy(filling, 1, 0, residual.data, residual_row + at)
                i += 1
            row += step

    @verb
    def read(frag, other, smem, stage, left):
        """My part of h of a chunk, 0 beyond the share."""
        index = pipe.begin(stage) + cuda.threadIdx.x * mem.vector
        for c in range(ELEMENTS):
            frag[c] = num.zero
        for v in range(config.vectors):
            if left > v * STEP:
                mem.load_shared(frag, v * mem.vector, smem.tiles, index + v * STEP)
                if variant.added:
                    mem.load_shared(other, 0, smem.tiles, index + v * STEP + pipe.tile)
                    for c in range(mem.vector):
                        frag[v * mem.vector + c] = mem.rounded(frag[v * mem.vector + c] + other[c])

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_stages(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share):
        smem, sent = pipe.smem(), group.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        begin = min(cluster_ctarank() * share, N)
        columns = Columns(begin, min(share, N - begin))
        if tid == 0:
            pipe.init(smem)
            group.init(sent)
        start_cluster()
        row, step = i64(cuda.blockIdx.x // config.cluster), cuda.gridDim.x // config.cluster

        if warp == config.row_warps:
            if lane == 0:
                feed(smem, columns, row, step, M, sizes, x, residual)
        else:
            frag = cuda.local.array(ELEMENTS, mem.number)  # my part of a chunk of h
            other = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(ELEMENTS, mem.number)
            b_frag = cuda.local.array(ELEMENTS, mem.number)
            place, planned = axes.place(), order.plan(columns.width)
            inverse_N = num.one / mem.number(N)
            of_warps = merging.columns(N, share)
            i, row_round = i32(0), i32(0)  # copies and rows so far
            while row < M:
                total, squares, my_mean, my_columns = num.zero, num.zero, num.zero, num.zero
                for k in range(planned.chunks):
                    stage = pipe.wait(smem, i + k)
                    left = i32(columns.width - (k * pipe.columns + tid * mem.vector))  # from my first column on
                    read(frag, other, smem, stage, left)
                    if k < planned.again:
                        pipe.release(smem, stage)
                    if variant.centred:
                        # of two sets of numbers, n * m / (n + m) * (difference of means)^2 more than of both alone
                        chunk_total, chunk_squares = num.zero, num.zero
                        for c in range(ELEMENTS):
                            chunk_total += frag[c]
                        count = mem.number(max(min((left + STEP - 1) // STEP, config.vectors), 0) * mem.vector)
                        chunk_mean = chunk_total / max(count, num.one)
                        for v in range(config.vectors):
                            few = num.zero
                            for c in range(v * mem.vector, (v + 1) * mem.vector):
                                few += (frag[c] - chunk_mean) * (frag[c] - chunk_mean)
                            chunk_squares += few if left > v * STEP else num.zero
                        apart, all_columns = chunk_mean - my_mean, my_columns + count
                        weight = count / max(all_columns, num.one)
                        squares += chunk_squares + apart * apart * my_columns * weight
                        my_mean += apart * weight
                        my_columns = all_columns
                        total += chunk_total
                    else:
                        chunk_squares = num.zero
                        for c in range(ELEMENTS):
                            chunk_squares += frag[c] * frag[c]
                        squares += chunk_squares

                row_mean = num.zero
                if variant.centred:
                    total = group.of_warp(total)
                    apart = my_mean - total * of_warps.my_inverse
                    squares += my_columns * apart * apart
                squares = group.of_warp(squares)
                group.send(sent, row_round, squares, total)
                found = group.wait(sent, row_round)
                squares = group.sum(sent, found)
                if variant.centred:
                    row_mean = group.sum(sent, found + 1) * inverse_N
                    squares += merging.between(sent, found, of_warps, row_mean)
                row_rstd = num.rsqrt(squares * inverse_N + eps)

                axes.locate(place, row, sizes)
                y_row, summed_row = axes.start(place, y) + begin, axes.start(place, summed) + begin
                for k in range(planned.chunks):
                    at = order.second(planned, k) * pipe.columns + tid * mem.vector
                    left = i32(columns.width - at)
                    for v in range(config.vectors):  # from L2, while the chunk may still be on its way
                        n = i64(begin + at) + v * STEP
                        w_and_b.load_w_plus(w_frag, v * mem.vector, w, n, left > v * STEP, offset)
                        w_and_b.load_b(b_frag, v * mem.vector, b, n, left > v * STEP)
                    stage = pipe.wait(smem, i + planned.again + k)
                    read(frag, other, smem, stage, left)
                    pipe.release(smem, stage)
                    for v in range(config.vectors):
                        keep, first = left > v * STEP, v * mem.vector
                        if variant.added:
                            mem.store_vector(summed.data, summed_row + at + v * STEP, keep, frag, first)
                        for c in range(first, first + mem.vector):
                            frag[c] = (frag[c] - row_mean) * row_rstd
                            if variant.w is not None:
                                frag[c] *= w_frag[c]
                            if variant.b is not None:
                                frag[c] += b_frag[c]
                        mem.store_vector(y.data, y_row + at + v * STEP, keep, frag, first)
                if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if (tid == 0) & (cluster_ctarank() == 0):
                        axes.write_statistics(place, mean, rstd, row_mean, row_rstd)
                i = i32(i + planned.chunks + planned.again)
                row += step
                row_round += 1

    return norm_ring_stages
