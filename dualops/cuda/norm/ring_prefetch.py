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

from ..compiler.backend import Kernel, builds, cuda, i32, kernel, verb
from ..rows.exchange import in_cluster
from ..tile.numbers import numbers
from ..tile.ring import ring
from ..tile.storage import storage
from .ring_rows import Sums, Weighting, ring_rows
from .staging import RingConfig, copies, shared_weights
from .variant import Variant, forward_types
from .verbs import norm_axes


class Begun(NamedTuple):
    """A row in a stage, whose warps have sent their sums; and those of my warp."""

    stage: Any
    sums: Sums


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring_ahead(arrays, params, rows, share): M rows of N."""
    mem, num, axes = storage(variant.dtype), numbers(storage(variant.dtype).number), norm_axes(variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    staging = copies(config, variant, pipe)
    group = in_cluster(mem.number, config.row_threads, config.rows, config.cluster, kept=4)
    deal = ring_rows(
        config, variant, pipe, staging, group, shared_weights(config.layout(variant), config.w_shared, variant)
    )
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
    def begin_row(block, i, left, of_warps):
        """Steps 1 and 2 of row number i, and what is sent for step 3."""
        frag = cuda.local.array(config.vectors * mem.vector, mem.number)
        stage = pipe.wait(block.smem, i)
        for v in range(config.vectors):
            read(frag, v * mem.vector, block.smem, stage, v)
        sums = deal.sums(frag, left, of_warps)
        if group.PARTS > 1:
            group.send(block.sent, i, sums.squares, sums.total)
        return Begun(stage, sums)

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_ahead(arrays, params, rows, share):
        block, tid = deal.begin(rows.N, share), cuda.threadIdx.x
        turns = staging.turns(rows)
        if tid // 32 == config.copier:
            deal.feed(block, turns, arrays, params)
        else:
            frag = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            b_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place, weighting = axes.place(), Weighting(w_frag, b_frag, params.offset)
            column = tid % config.row_threads * mem.vector
            left = i32(block.columns.width - column)  # columns from my first one on
            deal.load(weighting, block, params)
            of_warps, inverse_N = deal.of_warps(rows.N, share), num.one / mem.number(rows.N)

            row = turns.first + tid // config.row_threads
            rounds, i = staging.rounds(turns), i32(0)
            coming = Begun(i32(0), Sums(num.zero, num.zero))
            if i < rounds:
                coming = begin_row(block, i, left, of_warps)
            while i < rounds:
                now = coming
                if i + 1 < rounds:
                    coming = begin_row(block, i32(i + 1), left, of_warps)
                found = i32(0)
                if group.PARTS > 1:
                    found = group.wait(block.sent, i)
                row_mean, row_rstd = deal.merge(block, found, now.sums, of_warps, inverse_N, params.eps)

                axes.locate(place, row, rows.sizes)
                own = config.rows == 1 or row < rows.M
                y_row = axes.start(place, arrays.y) + (block.columns.begin + column)
                summed_row = axes.start(place, arrays.summed) + (block.columns.begin + column)
                for v in range(config.vectors):
                    keep = own & (left > v * STEP)
                    read(frag, 0, block.smem, now.stage, v)
                    if variant.added:
                        mem.store_kept(arrays.summed.data, summed_row + v * STEP, keep, frag, 0)
                    deal.scale(frag, 0, block, weighting, v, row_mean, row_rstd)
                    mem.store_kept(arrays.y.data, y_row + v * STEP, keep, frag, 0)
                pipe.release(block.smem, now.stage)
                deal.end(place, params, row_mean, row_rstd, own)
                row += turns.step
                i = i32(i + 1)

    return norm_ring_ahead
