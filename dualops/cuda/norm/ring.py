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

from ..compiler.backend import Kernel, builds, cuda, i32, kernel
from ..rows.exchange import in_cluster
from ..tile.numbers import numbers
from ..tile.ring import ring
from ..tile.storage import storage
from .ring_rows import Weighting, ring_rows
from .staging import RingConfig, copies, shared_weights
from .variant import Variant, forward_types
from .verbs import norm_axes


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring(arrays, params, rows, share): M rows of N columns."""
    mem, num, axes = storage(variant.dtype), numbers(storage(variant.dtype).number), norm_axes(variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    staging = copies(config, variant, pipe)
    group = in_cluster(mem.number, config.row_threads, config.rows, config.cluster)
    deal = ring_rows(
        config, variant, pipe, staging, group, shared_weights(config.layout(variant), config.w_shared, variant)
    )
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring(arrays, params, rows, share):
        block, tid = deal.begin(rows.N, share), cuda.threadIdx.x
        turns = staging.turns(rows)
        if tid // 32 == config.copier:
            deal.feed(block, turns, arrays, params)
        else:
            frag = cuda.local.array(config.vectors * mem.vector, mem.number)  # my part of h[row]
            other = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            b_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place, weighting = axes.place(), Weighting(w_frag, b_frag, params.offset)
            column = tid % config.row_threads * mem.vector
            left = i32(block.columns.width - column)  # columns from my first one on
            first_at = i32(tid // config.row_threads * pipe.columns + column)  # in a stage
            deal.load(weighting, block, params)
            of_warps, inverse_N = deal.of_warps(rows.N, share), num.one / mem.number(rows.N)

            row = turns.first + tid // config.row_threads
            rounds, i = staging.rounds(turns), i32(0)
            while i < rounds:
                axes.locate(place, row, rows.sizes)
                own = config.rows == 1 or row < rows.M
                stage = pipe.wait(block.smem, i)
                tile = pipe.begin(stage) + first_at
                for v in range(config.vectors):
                    at = tile + v * STEP
                    mem.load_shared(frag, v * mem.vector, block.smem.tiles, at)
                    if variant.added:
                        mem.load_shared(other, 0, block.smem.tiles, at + pipe.tile)
                        for c in range(mem.vector):
                            frag[v * mem.vector + c] = mem.rounded(frag[v * mem.vector + c] + other[c])
                if variant.added:
                    summed_row = axes.start(place, arrays.summed) + (block.columns.begin + column)
                    for v in range(config.vectors):
                        mem.store_vector(
                            arrays.summed.data, summed_row + v * STEP, own & (left > v * STEP), frag, v * mem.vector
                        )

                sums = deal.sums(frag, left, of_warps)
                if group.PARTS > 1:
                    group.send(block.sent, i, sums.squares, sums.total)
                pipe.release(block.smem, stage)  # not before: it waits for all loads, which sums overlap with
                found = i32(0)
                if group.PARTS > 1:
                    found = group.wait(block.sent, i)
                row_mean, row_rstd = deal.merge(block, found, sums, of_warps, inverse_N, params.eps)

                y_row = axes.start(place, arrays.y) + (block.columns.begin + column)
                for v in range(config.vectors):
                    deal.scale(frag, v * mem.vector, block, weighting, v, row_mean, row_rstd)
                    mem.store_vector(arrays.y.data, y_row + v * STEP, own & (left > v * STEP), frag, v * mem.vector)
                deal.end(place, params, row_mean, row_rstd, own)
                row += turns.step
                i = i32(i + 1)

    return norm_ring
