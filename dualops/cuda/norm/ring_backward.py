"""The gradient of norms on sm_90: like ring.py, with two or three arrays in a stage, and dw and db in registers.

    1  level = sum(g), along = sum(g * xhat) of every warp, g = dy * (w + offset), xhat = (x - mean) * rstd
    2  warps send theirs to every block of the cluster, and sum all of them                (st.async, one mbarrier)
    3  dx = rstd * (g - level / N - xhat * along / N) + dsummed;  dw += dy * xhat;  db += dy;  the stage is free
    4  the blocks' dw and db are summed by a second kernel (sums.py)

A row stays in its stage, and is read again in step 3. With `overlap`, steps 1 and 2 of the next row come before step 3
of a row; meanwhile the row's sums arrive. Each lane loads the statistics of a different row, long before they are used.

Instruction issue limits the kernel, apart from memory. While an H200's memory delivers 16 elements to each of 128
threads, the schedulers of an SM have 370 issue slots. layer_norm needs 420 instructions, of which 265 are for the
elements. So two sums share their shuffles. xhat is computed twice, and dx is scaled last: shorter forms overflow or
underflow float32 if x or dy is far from 1. Papers: see ring.py. Shared memory: that of ring.py, and a row of numbers if
a block has several rows. Registers: vectors * 16 / itemsize numbers per thread for each of w, dw and db, and about 60
more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, verb
from ..rows.exchange import in_cluster
from ..tile.numbers import numbers
from ..tile.ring import bar_sync, ring, start_cluster
from ..tile.rows import FULL_WARP
from ..tile.storage import storage
from ..tile.unrolled import local_array
from .arguments import Variant, backward_types, norm_axes
from .staging import RingConfig, copies, own_weights
from .sums import PIECE, partial_sums


class Begun(NamedTuple):
    """A row in a stage, whose warps have sent their sums."""

    stage: Any
    mean: Any
    rstd: Any
    along: Any
    level: Any


class Known(NamedTuple):
    """Statistics of the next rows and of the rows after them. Each lane that shares a row has those of another row."""

    mean: Any
    rstd: Any
    next_mean: Any
    next_rstd: Any


EVERYBODY = 15  # the barrier of all warps except the producer; a row's barrier has number 1 + its place in the block


@noun
def ring_gradient(config: RingConfig, variant: Variant) -> Members:
    """The verbs of the kernel."""
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    axes, own_w = norm_axes(variant), own_weights(config, variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    kept = 4 if config.overlap else 2
    group = in_cluster(mem.number, config.row_threads, config.rows, config.cluster, kept)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors
    AHEAD = 2 if config.overlap else 1  # distance from a row that is written to the row whose sums begin next
    SHARING = min(config.row_threads, 32)  # lanes of a warp that share a row

    @verb
    def first_in_stage():
        """Return where my first column begins in a row of a stage."""
        tid = cuda.threadIdx.x
        return i32(tid // config.row_threads * pipe.columns + tid % config.row_threads * mem.vector)

    @verb
    def statistics(place, row, turns, inputs):
        """Return the statistics of a later row: among the lanes that share my rows, lane n has the row n turns after
        `row`."""
        row += cuda.threadIdx.x % SHARING * turns.step
        row_mean, row_rstd = num.zero, num.zero
        if row < turns.M:
            axes.locate(place, row, turns.sizes)
            row_mean, row_rstd = axes.statistics(place, inputs)
        return row_mean, row_rstd

    @verb
    def begin(smem, sent, w_frag, w_smem, i, is_row, known):
        """Do steps 1 and 2 of row number i, except the sums over warps."""
        x_frag, dy_frag = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        level, along, row_mean = num.zero, num.zero, num.zero
        source = i32(cuda.threadIdx.x % 32 // SHARING * SHARING + (i & (SHARING - 1)))
        row_rstd = num.of_lane(known.rstd, source, FULL_WARP)
        if variant.centred:
            row_mean = num.of_lane(known.mean, source, FULL_WARP)
        stage = pipe.wait(smem, i)
        tile = pipe.begin(stage) + first_in_stage()
        if config.rows == 1 or is_row:  # else the stage holds an older row there
            for v in range(config.vectors):
                at = tile + v * STEP
                mem.load_shared(x_frag, 0, smem.tiles, at)
                mem.load_shared(dy_frag, 0, smem.tiles, at + pipe.tile)
                own_w.recall(w_frag, v * mem.vector, w_smem)
                for c in range(mem.vector):
                    g = dy_frag[c] * w_frag[v * mem.vector + c] if variant.w is not None else dy_frag[c]
                    if variant.centred:
                        level += g
                    along += g * ((x_frag[c] - row_mean) * row_rstd)
        if variant.centred:
            along, level = group.in_warp.sum_two(along, level)
        else:
            along = group.in_warp.sum(along)
        if group.PARTS > 1:
            group.send(sent, i, along, level)
        return Begun(stage, row_mean, row_rstd, along, level)

    return members(locals(), pipe=pipe, staging=copies(config, variant, pipe), group=group, own_w=own_w)


@builds
def build_backward(config: RingConfig, variant: Variant) -> Kernel:
    """Build norm_ring_backward(dx, partials, inputs, rows, offset, slots, share).

    partials has room for `slots` clusters of blocks.
    """
    mem, num, axes = storage(variant.dtype), numbers(storage(variant.dtype).number), norm_axes(variant)
    deal, make_one = ring_gradient(config, variant), local_array(mem.vector, mem.number)
    make = local_array(config.vectors * mem.vector, mem.number)  # my part of a row

    @verb
    def meet():
        bar_sync(EVERYBODY, config.readers)

    sums = partial_sums(variant, config.row_threads, config.vectors, config.rows, True, meet)

    @kernel(*backward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_backward(dx, partials, inputs, rows, offset, slots, share):
        # a stage has rows of x, then of dy, then of dsummed
        smem, sent, w_smem = deal.pipe.smem(), deal.group.smem(), deal.own_w.smem()
        table = sums.table(partials, slots, rows.N)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        columns = deal.staging.columns(rows.N, share)
        if tid == 0:
            deal.pipe.init(smem)
            deal.group.init(sent)
        deal.staging.clear(smem, columns)
        start_cluster()
        cluster, clusters = cuda.blockIdx.x // config.cluster, cuda.gridDim.x // config.cluster
        turns = deal.staging.turns(rows)

        if warp == config.copier:
            if lane == 0:
                deal.staging.feed(smem, turns, columns, (inputs.x, inputs.dy, inputs.dsummed))
        else:
            x_frag, dy_frag, other = make_one(), make_one(), make_one()  # a vector
            w_frag, dw_frag, db_frag = make(), make(), make()
            place = axes.place()
            column = tid % config.row_threads * mem.vector
            left = i32(columns.width - column)  # columns from my first column on
            first_at = deal.first_in_stage()
            inverse_N = num.one / mem.number(rows.N)
            for v in range(config.vectors):
                n = i64(columns.begin + column) + v * deal.STEP
                deal.own_w.load(w_frag, v * mem.vector, inputs.w, n, left > v * deal.STEP, offset)
            deal.own_w.put(w_frag, w_smem)

            row = turns.first + tid // config.row_threads
            first = deal.statistics(place, row, turns, inputs)
            then = deal.statistics(place, row + deal.SHARING * turns.step, turns, inputs)
            known = Known(first[0], first[1], then[0], then[1])
            now = coming = Begun(i32(0), num.zero, num.zero, num.zero, num.zero)
            rounds, i = deal.staging.rounds(turns), i32(0)
            if config.overlap:  # before the first row's sums there is no row to write
                coming = deal.begin(smem, sent, w_frag, w_smem, i, row < rows.M, known)
            while i < rounds:
                for c in range(len(w_frag)):
                    dw_frag[c] = num.zero
                    db_frag[c] = num.zero
                end = i32(min(i32(i + PIECE), rounds))
                more = i > 0
                while i < end:
                    if i > 0:
                        # release the previous row's stage here; at the row's end, the sums would wait for this branch
                        deal.pipe.release(smem, now.stage)
                    if config.overlap:
                        now = coming
                        if i32(i + 1) < rounds:
                            is_row = row + turns.step < rows.M
                            coming = deal.begin(smem, sent, w_frag, w_smem, i32(i + 1), is_row, known)
                    else:
                        now = deal.begin(smem, sent, w_frag, w_smem, i, row < rows.M, known)
                    if ((i + deal.AHEAD) & (deal.SHARING - 1)) == 0:
                        later = deal.statistics(place, row + (deal.AHEAD + deal.SHARING) * turns.step, turns, inputs)
                        known = Known(known.next_mean, known.next_rstd, later[0], later[1])
                    row_mean = now.mean if variant.centred else num.zero
                    row_rstd, along, level = now.rstd, now.along, now.level
                    if deal.group.PARTS > 1:
                        found = deal.group.wait(sent, i)
                        if variant.centred:
                            along, level = deal.group.sum_two(sent, found)
                        else:
                            along = deal.group.sum(sent, found)
                    along *= inverse_N
                    level = level * inverse_N if variant.centred else num.zero
                    tile = deal.pipe.begin(now.stage) + first_at
                    own = config.rows == 1 or row < rows.M

                    if own:
                        axes.locate(place, row, rows.sizes)
                        dx_row = axes.start(place, dx) + (columns.begin + column)
                        for v in range(config.vectors):
                            at = tile + v * deal.STEP
                            mem.load_shared(x_frag, 0, smem.tiles, at)
                            mem.load_shared(dy_frag, 0, smem.tiles, at + deal.pipe.tile)
                            deal.own_w.recall(w_frag, v * mem.vector, w_smem)
                            if variant.added:
                                mem.load_shared(other, 0, smem.tiles, at + 2 * deal.pipe.tile)
                            for c in range(mem.vector):
                                if variant.db:
                                    db_frag[v * mem.vector + c] += dy_frag[c]
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                if variant.dw:
                                    dw_frag[v * mem.vector + c] += dy_frag[c] * xhat
                                g = dy_frag[c] * w_frag[v * mem.vector + c] if variant.w is not None else dy_frag[c]
                                x_frag[c] = (g - level - xhat * along) * row_rstd
                                if variant.added:
                                    x_frag[c] += other[c]
                            mem.store_vector(dx.data, dx_row + v * deal.STEP, left > v * deal.STEP, x_frag, 0)
                    row += turns.step
                    i = i32(i + 1)

                sums.write(table, i64(cluster), columns, dw_frag, db_frag, more)
            sums.clear(table, i64(cluster), i64(clusters), columns)

    return norm_ring_backward
