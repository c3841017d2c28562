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

from ..backend import Kernel, builds, cuda, i32, i64, kernel
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, ring, start_cluster
from ..tile.storage import storage
from .merging import merged_means
from .staging import RingConfig, copies, shared_weights
from .variant import Variant, forward_types
from .verbs import cluster_sums, norm_axes


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N columns."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    axes, w_and_b = norm_axes(variant), shared_weights(config, variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    staging = copies(config, variant, pipe)
    group = cluster_sums(mem.number, config.row_threads, config.rows, config.cluster)
    merging = merged_means(config, variant)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share):
        smem, sent, waiting = pipe.smem(), group.smem(), w_and_b.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        columns = staging.columns(N, share)
        if tid == 0:
            pipe.init(smem)
            group.init(sent)
            w_and_b.init(waiting)
        staging.clear(smem, columns)
        start_cluster()
        turns = staging.turns(M, sizes)

        if warp == config.copier:
            if lane == 0:
                w_and_b.copy(waiting, w, b, columns)
                staging.feed(smem, turns, columns, (x, residual))
        else:
            frag = cuda.local.array(config.vectors * mem.vector, mem.number)  # my part of h[row]
            other = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            b_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place = axes.place()
            column = tid % config.row_threads * mem.vector
            left = i32(columns.width - column)  # columns from my first one on
            first_at = i32(tid // config.row_threads * pipe.columns + column)  # in a stage
            inverse_N = num.one / mem.number(N)
            w_and_b.wait(waiting)
            for v in range(config.vectors):
                n = i64(columns.begin + column) + v * STEP
                w_and_b.load_w_plus(w_frag, v * mem.vector, w, n, left > v * STEP, offset)
                w_and_b.load_b(b_frag, v * mem.vector, b, n, left > v * STEP)
            of_warps = merging.columns(N, share)

            row = turns.first + tid // config.row_threads
            rounds, i = staging.rounds(turns), i32(0)
            while i < rounds:
                axes.locate(place, row, sizes)
                own = config.rows == 1 or row < M
                stage = pipe.wait(smem, i)
                tile = pipe.begin(stage) + first_at
                for v in range(config.vectors):
                    at = tile + v * STEP
                    mem.load_shared(frag, v * mem.vector, smem.tiles, at)
                    if variant.added:
                        mem.load_shared(other, 0, smem.tiles, at + pipe.tile)
                        for c in range(mem.vector):
                            frag[v * mem.vector + c] = mem.rounded(frag[v * mem.vector + c] + other[c])
                if variant.added:
                    summed_row = axes.start(place, summed) + (columns.begin + column)
                    for v in range(config.vectors):
                        mem.store_vector(
                            summed.data, summed_row + v * STEP, own & (left > v * STEP), frag, v * mem.vector
                        )

                row_mean, total, squares = num.zero, num.zero, num.zero
                if variant.centred:
                    for v in range(config.vectors):
                        few = num.zero  # a vector's own sum, so that no chain of additions is long
                        for c in range(v * mem.vector, (v + 1) * mem.vector):
                            few += frag[c]
                        total += few
                    total = group.of_warp(total)
                    row_mean = total * of_warps.my_inverse
                    for v in range(config.vectors):
                        few = num.zero
                        for c in range(v * mem.vector, (v + 1) * mem.vector):
                            apart = frag[c] - row_mean
                            few += apart * apart
                        squares += few if left > v * STEP else num.zero
                else:
                    for v in range(config.vectors):
                        few = num.zero
                        for c in range(v * mem.vector, (v + 1) * mem.vector):
                            few += frag[c] * frag[c]
                        squares += few
                squares = group.of_warp(squares)
                if group.parts > 1:
                    group.send(sent, i, squares, total)
                pipe.release(smem, stage)  # not before: it waits for all loads, which sums overlap with
                if group.parts > 1:
                    found = group.wait(sent, i)
                    squares = group.sum(sent, found)
                    if variant.centred:
                        row_mean = group.sum(sent, found + 1) * inverse_N
                        squares += merging.between(sent, found, of_warps, row_mean)
                row_rstd = num.rsqrt(squares * inverse_N + eps)

                y_row = axes.start(place, y) + (columns.begin + column)
                for v in range(config.vectors):
                    w_and_b.recall_w(w_frag, v * mem.vector, waiting, column + v * STEP, offset)
                    w_and_b.recall_b(b_frag, v * mem.vector, waiting, column + v * STEP)
                    for c in range(v * mem.vector, (v + 1) * mem.vector):
                        frag[c] = (frag[c] - row_mean) * row_rstd
                        if variant.w is not None:
                            frag[c] *= w_frag[c]
                        if variant.b is not None:
                            frag[c] += b_frag[c]
                    mem.store_vector(y.data, y_row + v * STEP, own & (left > v * STEP), frag, v * mem.vector)
                if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if own & (column == 0) & (cluster_ctarank() == 0):
                        axes.write_statistics(place, mean, rstd, row_mean, row_rstd)
                row += turns.step
                i = i32(i + 1)

    return norm_ring
