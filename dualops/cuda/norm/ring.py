"""Norms on sm_90: blocks process one row after the other, while the next rows are copied to shared memory.

A block has `rows` rows at once, each shared by `row_threads` threads; or a cluster of blocks shares one row, and each
block has `share` of its columns. A producer warp copies sets of rows into a ring of stages (cp.async.bulk), as early as
stages are free. w and b of a thread's columns stay in registers from row to row, or in shared memory (`w_shared`).

    1  h = x + residual to registers
    2  rms_norm: sum(h * h) of every warp. layer_norm: sum(h) of every warp, and the sum of (h - its own mean)^2
    3  the stage is free; warps send theirs to every block of the cluster, and merge all   (st.async, one mbarrier)
           mean = sum(sums) / N,  squares = sum(their squares + columns * (their mean - mean)^2)
    4  y = (h - mean) * rstd * (w + offset) + b

With `overlap`, steps 1 and 2 of the next row come before step 3 of a row; meanwhile the row's sums arrive. That row
stays in its stage, and h is computed again in step 4. Its results are plain stores, which are 2 % faster there than
stores with evict-first priority.

Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450; merging in step 3: Chan et al. 1979.
Shared memory: stages * arrays * rows * row_threads * vectors * 16 bytes, w and b, and about 4 KiB. Registers:
vectors * 16 / itemsize numbers per thread for each of h, w and b, and about 40 more. Backward: ring_backward.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, verb
from ..rows.exchange import in_cluster
from ..rows.operator import Columns
from ..tile.numbers import numbers
from ..tile.ring import RingSmem, cluster_ctarank, ring, start_cluster
from ..tile.storage import storage
from .arguments import Variant, forward_types, norm_axes
from .operator import columns_of_warps
from .staging import RingConfig, WeightsSmem, copies, shared_weights


class Block(NamedTuple):
    """A block's part of the rows, and its shared memory."""

    smem: RingSmem
    sent: Any  # the parts of rows' sums
    waiting: WeightsSmem
    columns: Columns


class Begun(NamedTuple):
    """A row in a stage, and my warp's sums of it (`send`)."""

    stage: Any
    sums: Any


class WarpColumns(NamedTuple):
    """Numbers of a row's columns that warps have: the reciprocal for my warp, and those of the parts that my lane
    adds."""

    my_inverse: Any
    columns: Any
    inverse: Any


@noun
def ring_rows(config: RingConfig, variant: Variant) -> Members:
    """The verbs of the kernel."""
    mem, num, layout = storage(variant.dtype), numbers(storage(variant.dtype).number), config.layout(variant)
    pipe = ring(layout.stages, config.copier)
    staging, w_and_b = copies(config, variant, pipe), shared_weights(layout, config.w_shared, variant)
    group = in_cluster(mem.number, config.row_threads, config.rows, config.cluster, kept=4 if config.overlap else 2)
    columns_of = columns_of_warps(config.row_threads, mem.vector, mem.number)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @verb
    def begin(N, share):
        """Initialize the mbarriers, and wait until the cluster runs; by all threads."""
        smem, sent, waiting = pipe.smem(), group.smem(), w_and_b.smem()
        columns = staging.columns(N, share)
        if cuda.threadIdx.x == 0:
            pipe.init(smem)
            group.init(sent)
            w_and_b.init(waiting)
        staging.clear(smem, columns)
        start_cluster()
        return Block(smem, sent, waiting, columns)

    @verb
    def feed(block, turns, arrays, params):
        """Copy w, b and all rows; by the producer warp."""
        if cuda.threadIdx.x % 32 == 0:
            w_and_b.copy(block.waiting, params.w, params.b, block.columns)
            staging.feed(block.smem, turns, block.columns, (arrays.x, arrays.other))

    @verb
    def load(w_frag, b_frag, block, params):
        """Load w and b of my columns, after they have arrived in shared memory, or into registers that keep them."""
        column = cuda.threadIdx.x % config.row_threads * mem.vector
        w_and_b.wait(block.waiting)
        for v in range(config.vectors):
            n, keep = i64(block.columns.begin + column) + v * STEP, block.columns.width - column > v * STEP
            w_and_b.load_w_plus(w_frag, v * mem.vector, params.w, n, keep, params.offset)
            w_and_b.load_b(b_frag, v * mem.vector, params.b, n, keep)

    @verb
    def of_warps(N, share):
        """Return the numbers of columns of warps; without a mean nothing is computed."""
        count, inverse = cuda.local.array(group.LANE_PARTS, mem.number), cuda.local.array(group.LANE_PARTS, mem.number)
        my_inverse = num.one
        if variant.centred:
            my_inverse = num.one / max(columns_of(group.my_part(), N, share), num.one)
            for k in range(group.LANE_PARTS):
                count[k] = columns_of(i32(group.part(k)), N, share)
                inverse[k] = num.one / max(count[k], num.one)
        return WarpColumns(my_inverse, count, inverse)

    @verb
    def read(frag, at, smem, stage, v):
        """Read my vector v of h; zeros after the row's end."""
        tid, other = cuda.threadIdx.x, cuda.local.array(mem.vector, mem.number)
        first = tid // config.row_threads * pipe.columns + tid % config.row_threads * mem.vector
        index = pipe.begin(stage) + i32(first + v * STEP)
        mem.load_shared(frag, at, smem.tiles, index)
        if variant.added:
            mem.load_shared(other, 0, smem.tiles, index + pipe.tile)
            for c in range(mem.vector):
                frag[at + c] = mem.rounded(frag[at + c] + other[c])

    @verb
    def send(frag, block, i, left, of_warps):
        """Send my warp's sums of row number i, and return them: of h, 0 without a mean, and of the squares about its
        own mean. frag has my part of the row. left: columns from my first column on.
        """
        mean, total, squares = num.zero, num.zero, num.zero
        if variant.centred:
            for v in range(config.vectors):
                few = num.zero  # the sum of one vector, so that no chain of additions is long
                for c in range(v * mem.vector, (v + 1) * mem.vector):
                    few += frag[c]
                total += few
            total = group.in_warp.sum(total)
            mean = total * of_warps.my_inverse
        for v in range(config.vectors):
            few = num.zero
            for c in range(v * mem.vector, (v + 1) * mem.vector):
                apart = frag[c] - mean if variant.centred else frag[c]
                few += apart * apart
            squares += few if not variant.centred or left > v * STEP else num.zero
        squares = group.in_warp.sum(squares)
        if group.PARTS > 1:
            group.send(block.sent, i, squares, total)
        return total, squares

    @verb
    def begin_row(block, i, left, of_warps):
        """Do steps 1 and 2 of row number i, and send the sums for step 3."""
        frag = cuda.local.array(config.vectors * mem.vector, mem.number)
        stage = pipe.wait(block.smem, i)
        for v in range(config.vectors):
            read(frag, v * mem.vector, block.smem, stage, v)
        return Begun(stage, send(frag, block, i, left, of_warps))

    @verb
    def merge(block, i, sums, of_warps, inverse_N, eps):
        """Return the mean and rstd of row number i."""
        squares, row_mean = sums[1], sums[0] * inverse_N
        if group.PARTS > 1:
            found = group.wait(block.sent, i)
            squares = group.sum(block.sent, found)
            if variant.centred:
                row_mean, between = group.sum(block.sent, found + 1) * inverse_N, num.zero
                for k in range(group.LANE_PARTS):
                    if group.given(k):
                        apart = group.b(block.sent, found, k) * of_warps.inverse[k] - row_mean
                        between += of_warps.columns[k] * apart * apart
                squares += group.lanes.sum(between)
        return row_mean, num.rsqrt(squares * inverse_N + eps)

    @verb
    def scale(frag, at, block, weighting, v, row_mean, row_rstd):
        """Turn h of vector v into y. weighting: w and b in registers, if they are there, and the offset."""
        w_frag, b_frag, offset = weighting
        first, column = v * mem.vector, cuda.threadIdx.x % config.row_threads * mem.vector + v * STEP
        w_and_b.recall_w(w_frag, first, block.waiting, column, offset)
        w_and_b.recall_b(b_frag, first, block.waiting, column)
        for c in range(mem.vector):
            frag[at + c] = (frag[at + c] - row_mean) * row_rstd
            if variant.w is not None:
                frag[at + c] *= w_frag[first + c]
            if variant.b is not None:
                frag[at + c] += b_frag[first + c]

    return members(locals(), pipe=pipe, staging=staging)


@builds
def build_forward(config: RingConfig, variant: Variant) -> Kernel:
    """Build norm_ring(arrays, params, rows, share), or norm_ring_ahead, for M rows of N columns."""
    mem, num, axes = storage(variant.dtype), numbers(storage(variant.dtype).number), norm_axes(variant)
    deal, store = ring_rows(config, variant), mem.store_kept if config.overlap else mem.store_vector
    KEPT = 0 if config.overlap else mem.vector  # numbers of each vector that frag keeps, except the last vector
    SIZE = mem.vector if config.overlap else config.vectors * mem.vector

    @kernel(
        *forward_types(variant),
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
        name="norm_ring_ahead" if config.overlap else "norm_ring",
    )
    def norm_ring(arrays, params, rows, share):
        block, tid = deal.begin(rows.N, share), cuda.threadIdx.x
        turns = deal.staging.turns(rows)
        if tid // 32 == config.copier:
            deal.feed(block, turns, arrays, params)
        else:
            frag = cuda.local.array(SIZE, mem.number)  # my part of h[row]
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            b_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place, weighting = axes.place(), (w_frag, b_frag, params.offset)
            column = tid % config.row_threads * mem.vector
            left = i32(block.columns.width - column)  # columns from my first column on
            deal.load(w_frag, b_frag, block, params)
            of_warps, inverse_N = deal.of_warps(rows.N, share), num.one / mem.number(rows.N)

            row = turns.first + tid // config.row_threads
            rounds, i = deal.staging.rounds(turns), i32(0)
            sums = num.zero, num.zero
            now = coming = Begun(i32(0), sums)
            if config.overlap and i < rounds:  # before the first row's sums there is no row to write
                coming = deal.begin_row(block, i, left, of_warps)
            while i < rounds:
                axes.locate(place, row, rows.sizes)
                own = config.rows == 1 or row < rows.M
                if config.overlap:
                    now, sums = coming, coming.sums
                    if i32(i + 1) < rounds:
                        coming = deal.begin_row(block, i32(i + 1), left, of_warps)
                else:
                    stage = deal.pipe.wait(block.smem, i)
                    for v in range(config.vectors):
                        deal.read(frag, v * mem.vector, block.smem, stage, v)
                    if variant.added:
                        summed_row = axes.start(place, arrays.summed) + (block.columns.begin + column)
                        for v in range(config.vectors):
                            keep = own & (left > v * deal.STEP)
                            store(arrays.summed.data, summed_row + v * deal.STEP, keep, frag, v * mem.vector)
                    sums = deal.send(frag, block, i, left, of_warps)
                    deal.pipe.release(block.smem, stage)  # not earlier: it waits for loads, which sums overlap with
                row_mean, row_rstd = deal.merge(block, i, sums, of_warps, inverse_N, params.eps)

                y_row = axes.start(place, arrays.y) + (block.columns.begin + column)
                for v in range(config.vectors):
                    keep = own & (left > v * deal.STEP)
                    if config.overlap:
                        deal.read(frag, 0, block.smem, now.stage, v)
                        if variant.added:
                            summed_row = axes.start(place, arrays.summed) + (block.columns.begin + column)
                            store(arrays.summed.data, summed_row + v * deal.STEP, keep, frag, 0)
                    deal.scale(frag, v * KEPT, block, weighting, v, row_mean, row_rstd)
                    store(arrays.y.data, y_row + v * deal.STEP, keep, frag, v * KEPT)
                if config.overlap:
                    deal.pipe.release(block.smem, now.stage)
                if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                    if own & (column == 0) & (cluster_ctarank() == 0):
                        axes.write_statistics(place, params, row_mean, row_rstd)
                row += turns.step
                i = i32(i + 1)

    return norm_ring
