"""Norms of long rows on sm_90, two of which are under way: the next row's sums are sent before a row's are waited for.

Clusters, the ring and what becomes of w and b are those of ring.py, but that a row is read again from its stage:

    1  h = x + residual. rms_norm: sum(h * h) of every warp. layer_norm: sum(h) of every warp, and the sum of
       (h - its own mean)^2; warps send theirs to every block of the cluster                    (st.async, one mbarrier)
    2  the row before it, whose sums have arrived meanwhile: warps merge all of them
           mean = sum(sums) / N,  squares = sum(their squares + columns * (their mean - mean)^2)
    3  h is made again: y = (h - mean) * rstd * (w + offset) + b; the stage is free

Results are stored as anything else is, not as the first to leave L2: a ring gains 2 % by it.
Papers as in ring.py. Shared memory: that of ring.py. Registers: vectors * 16 / itemsize numbers a thread for each of h,
w and b, and about 40 more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, ring, start_cluster
from ..tile.storage import storage
from .merging import merged_means
from .staging import RingConfig, copies, shared_weights
from .variant import Variant, forward_types
from .verbs import cluster_sums, norm_axes


class Begun(NamedTuple):
    """A row in a stage, whose warps have sent their sums; and those of my warp."""

    stage: Any
    squares: Any
    total: Any


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring_ahead(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    axes, w_and_b = norm_axes(variant), shared_weights(config, variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    staging = copies(config, variant, pipe)
    group = cluster_sums(mem.number, config.row_threads, config.rows, config.cluster, kept=4)
    merging = merged_means(config, variant)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @verb
    def read(frag, at, smem, stage, v):
        """My vector v of h; zeros behind the columns of the row."""
        tid = cuda.threadIdx.x
        index = pipe.begin(stage) + i32(
            tid // config.row_threads * pipe.columns + tid % config.row_threads * mem.vector + v * STEP
        )
        other = cuda.local.array(mem.vector, mem.number)
        mem.load_shared(frag, at, smem.tiles, index)
        if variant.added:
            mem.load_shared(other, 0, smem.tiles, index + pipe.tile)
            for c in range(mem.vector):
                frag[at + c] = mem.rounded(frag[at + c] + other[c])

    @verb
    def begin(smem, sent, i, left, of_warps):
        """Steps 1 and 2 of row number i, and what is sent for step 3."""
        frag = cuda.local.array(config.vectors * mem.vector, mem.number)
        stage = pipe.wait(smem, i)
        for v in range(config.vectors):
            read(frag, v * mem.vector, smem, stage, v)
        warp_mean, total, squares = num.zero, num.zero, num.zero
        if variant.centred:
            for v in range(config.vectors):
                few = num.zero  # a vector's own sum, so that no chain of additions is long
                for c in range(v * mem.vector, (v + 1) * mem.vector):
                    few += frag[c]
                total += few
            total = group.of_warp(total)
            warp_mean = total * of_warps.my_inverse
        for v in range(config.vectors):
            few = num.zero
            for c in range(v * mem.vector, (v + 1) * mem.vector):
                apart = frag[c] - warp_mean if variant.centred else frag[c]
                few += apart * apart
            squares += few if not variant.centred or left > v * STEP else num.zero
        squares = group.of_warp(squares)
        if group.parts > 1:
            group.send(sent, i, squares, total)
        return Begun(stage, squares, total)

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_ahead(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share):
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
            frag = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            b_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place = axes.place()
            column = tid % config.row_threads * mem.vector
            left = i32(columns.width - column)  # columns from my first one on
            inverse_N = num.one / mem.number(N)
            w_and_b.wait(waiting)
            for v in range(config.vectors):
                n = i64(columns.begin + column) + v * STEP
                w_and_b.load_w_plus(w_frag, v * mem.vector, w, n, left > v * STEP, offset)
                w_and_b.load_b(b_frag, v * mem.vector, b, n, left > v * STEP)
            of_warps = merging.columns(N, share)

            row = turns.first + tid // config.row_threads
            rounds, i = staging.rounds(turns), i32(0)
            coming = Begun(i32(0), num.zero, num.zero)
            if i < rounds:
                coming = begin(smem, sent, i, left, of_warps)
            while i < rounds:
                now = coming
                if i + 1 < rounds:
                    coming = begin(smem, sent, i32(i + 1), left, of_warps)
                squares, row_mean = now.squares, now.total * inverse_N
                if group.parts > 1:
                    found = group.wait(sent, i)
                    squares = group.sum(sent, found)
                    if variant.centred:
                        row_mean = group.sum(sent, found + 1) * inverse_N
                        squares += merging.between(sent, found, of_warps, row_mean)
                row_rstd = num.rsqrt(squares * inverse_N + eps)

                axes.locate(place, row, sizes)
                own = config.rows == 1 or row < M
                y_row = axes.start(place, y) + (columns.begin + column)
                summed_row = axes.start(place, summed) + (columns.begin + column)
                for v in range(config.vectors):
                    first, keep = v * mem.vector, own & (left > v * STEP)
                    read(frag, 0, smem, now.stage, v)
                    if variant.added:
                        mem.store_kept(summed.data, summed_row + v * STEP, keep, frag, 0)
                    w_and_b.recall_w(w_frag, first, waiting, column + v * STEP, offset)
                    w_and_b.recall_b(b_frag, first, waiting, column + v * STEP)
                    for c in range(mem.vector):
                        frag[c] = (frag[c] - row_mean) * row_rstd
                        if variant.w is not None:
                            frag[c] *= w_frag[first + c]
                        if variant.b is not None:
                            frag[c] += b_frag[first + c]
                    mem.store_kept(y.data, y_row + v * STEP, keep, frag, 0)
                pipe.release(smem, now.stage)
                if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if own & (column == 0) & (cluster_ctarank() == 0):
                        axes.write_statistics(place, mean, rstd, row_mean, row_rstd)
                row += turns.step
                i = i32(i + 1)

    return norm_ring_ahead
