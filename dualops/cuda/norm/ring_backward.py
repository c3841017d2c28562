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

from collections.abc import Callable

from ..backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.ring import bar_sync, ring, start_cluster
from ..tile.storage import storage
from .staging import RingConfig, copies, own_weights
from .sums import PIECE, partial_sums
from .variant import Variant, backward_types
from .verbs import cluster_sums, norm_axes

EVERYBODY = 15  # the barrier of all warps but the copying one; a row has number 1 + its place in the block


def readers_meet(readers: int) -> Callable[[], None]:
    """A verb: a barrier of all threads but the copying warp's."""

    @verb
    def meet():
        bar_sync(EVERYBODY, readers)

    return meet


@builds
def build_backward(config: RingConfig, variant: Variant) -> Kernel:
    """norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share).

    partials has room for `slots` clusters of blocks.
    """
    mem, num = storage(variant.dtype), numbers(storage(variant.dtype).number)
    axes, own_w = norm_axes(variant), own_weights(config, variant)
    pipe = ring(config.layout(variant).stages, config.copier)
    staging = copies(config, variant, pipe)
    group = cluster_sums(mem.number, config.row_threads, config.rows, config.cluster)
    sums = partial_sums(variant, config.row_threads, config.vectors, config.rows, True, readers_meet(config.readers))
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @kernel(*backward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_ring_backward(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots, share):
        # a stage: rows of x, then of dy, then of dsummed
        smem, sent, w_smem = pipe.smem(), group.smem(), own_w.smem()
        table = sums.table(partials, slots, N)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        columns = staging.columns(N, share)
        if tid == 0:
            pipe.init(smem)
            group.init(sent)
        staging.clear(smem, columns)
        start_cluster()
        cluster, clusters = cuda.blockIdx.x // config.cluster, cuda.gridDim.x // config.cluster
        turns = staging.turns(M, sizes)

        if warp == config.copier:
            if lane == 0:
                staging.feed(smem, turns, columns, (x, dy, dsummed))
        else:
            x_frag = cuda.local.array(mem.vector, mem.number)
            dy_frag = cuda.local.array(mem.vector, mem.number)
            other = cuda.local.array(mem.vector, mem.number)
            w_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            dw_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            db_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            place = axes.place()
            column = tid % config.row_threads * mem.vector
            left = i32(columns.width - column)  # columns from my first one on
            first_at = i32(tid // config.row_threads * pipe.columns + column)  # in a stage
            inverse_N = num.one / mem.number(N)
            for v in range(config.vectors):
                n = i64(columns.begin + column) + v * STEP
                own_w.load(w_frag, v * mem.vector, w, n, left > v * STEP, offset)
            own_w.put(w_frag, w_smem)

            row = turns.first + tid // config.row_threads
            next_mean, next_rstd = num.zero, num.zero
            if row < M:
                axes.locate(place, row, sizes)
                next_mean, next_rstd = axes.statistics(place, mean, rstd)
            rounds, i, stage = staging.rounds(turns), i32(0), i32(0)
            while i < rounds:
                for c in range(len(w_frag)):
                    dw_frag[c] = num.zero
                    db_frag[c] = num.zero
                end = i32(min(i + PIECE, rounds))
                more = i > 0
                while i < end:
                    if i > 0:
                        # of the row before; at its own end, sums would wait behind the branch
                        pipe.release(smem, stage)
                    row_mean, row_rstd = next_mean, next_rstd
                    if row + turns.step < M:
                        axes.locate(place, row + turns.step, sizes)
                        next_mean, next_rstd = axes.statistics(place, mean, rstd)
                    own = config.rows == 1 or row < M

                    level, along = num.zero, num.zero
                    stage = pipe.wait(smem, i)
                    tile = pipe.begin(stage) + first_at
                    if own:  # else the stage holds an older row there
                        for v in range(config.vectors):
                            at = tile + v * STEP
                            mem.load_shared(x_frag, 0, smem.tiles, at)
                            mem.load_shared(dy_frag, 0, smem.tiles, at + pipe.tile)
                            own_w.recall(w_frag, v * mem.vector, w_smem)
                            for c in range(mem.vector):
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                g = dy_frag[c] * w_frag[v * mem.vector + c] if variant.w is not None else dy_frag[c]
                                if variant.centred:
                                    level += g
                                along += g * xhat
                    along = group.of_warp(along)
                    if variant.centred:
                        level = group.of_warp(level)
                    if group.parts > 1:
                        group.send(sent, i, along, level)
                        found = group.wait(sent, i)
                        along = group.sum(sent, found)
                        if variant.centred:
                            level = group.sum(sent, found + 1)
                    along *= inverse_N
                    level = level * inverse_N if variant.centred else num.zero

                    if own:
                        axes.locate(place, row, sizes)
                        dx_row = axes.start(place, dx) + (columns.begin + column)
                        for v in range(config.vectors):
                            at = tile + v * STEP
                            mem.load_shared(x_frag, 0, smem.tiles, at)
                            mem.load_shared(dy_frag, 0, smem.tiles, at + pipe.tile)
                            own_w.recall(w_frag, v * mem.vector, w_smem)
                            if variant.added:
                                mem.load_shared(other, 0, smem.tiles, at + 2 * pipe.tile)
                            for c in range(mem.vector):
                                xhat = (x_frag[c] - row_mean) * row_rstd
                                g = dy_frag[c] * w_frag[v * mem.vector + c] if variant.w is not None else dy_frag[c]
                                if variant.dw:
                                    dw_frag[v * mem.vector + c] += dy_frag[c] * xhat
                                if variant.db:
                                    db_frag[v * mem.vector + c] += dy_frag[c]
                                x_frag[c] = (g - level - xhat * along) * row_rstd
                                if variant.added:
                                    x_frag[c] += other[c]
                            mem.store_vector(dx.data, dx_row + v * STEP, left > v * STEP, x_frag, 0)
                    row += turns.step
                    i = i32(i + 1)

                sums.write(table, i64(cluster), columns, dw_frag, db_frag, more)
            sums.clear(table, i64(cluster), i64(clusters), columns)

    return norm_ring_backward
