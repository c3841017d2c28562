"""rms_norm of rows of 32 KiB to 1 MiB on sm_90, layer_norm to 384 KiB: they wait in the registers of a cluster.

    1  h = x + residual, as it is stored. rms_norm: the sum of h * h of every warp. layer_norm: the sum of h of every
       warp, and the sum of (h - its own mean)^2
    2  warps send theirs to every block of the cluster, and merge all of them  (st.async, one mbarrier)
    3  y = (h - mean) * rstd * (w + offset) + b; a vector that is done with makes room for that of the cluster's next
       row

While a row's blocks load, or wait for one another, those of other rows on the same SM compute and write: the hardware
starts a cluster wherever there is room for one, so that all SMs are busy to the end. w and b come to shared memory once
for the few rows that a cluster takes: more of them, and the last clusters are alone for longer; less, and w is read
more often than x. Results are stored as anything else is, not as the first to leave L2, which is 1 to 2 % faster.

Ba, Kiros & Hinton 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467; Chan et al. 1979. Shared memory: w
and b. Registers: 4 a vector of x and of residual, and about 40, of layer_norm 50.
"""

from __future__ import annotations

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.packed import anew_i32, packed
from ..tile.ring import cluster_ctarank, start_mbarriers
from ..tile.storage import storage
from .merging import listed_means
from .moments import thread_moments
from .staging import ClusterRowsConfig, columns_of_block, shared_weights
from .variant import Variant, forward_types
from .verbs import cluster_sums, norm_axes


@builds
def build_forward(config: ClusterRowsConfig, variant: Variant) -> Kernel:
    """norm_cluster_rows(to, given, work, share): M rows of N."""
    mem, num, regs = storage(variant.dtype), numbers(storage(variant.dtype).number), packed(variant.dtype)
    axes, weights = norm_axes(variant), shared_weights(config, variant)
    group = cluster_sums(mem.number, config.row_threads, 1, config.cluster)
    merging, moments = listed_means(config, variant), thread_moments(variant, 1)
    STEP = config.row_threads * mem.vector  # columns between a thread's vectors

    @verb
    def load(held, other, v, x, residual, place, n, keep):
        """Vector v of my part of a row, whose columns begin at n."""
        regs.load(held, v, x.data, axes.start(place, x) + n + v * STEP, keep, num.zero)
        if variant.added:
            regs.load(other, v, residual.data, axes.start(place, residual) + n + v * STEP, keep, num.zero)

    @verb
    def add(frag, held, other, v):
        """h of a vector, which takes the place of x's: frag is x's."""
        frag_of_other = cuda.local.array(mem.vector, mem.number)
        regs.unpack(frag_of_other, 0, other, v)
        for c in range(mem.vector):
            frag[c] = mem.rounded(frag[c] + frag_of_other[c])
        regs.pack(held, v, frag, 0)

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_cluster_rows(to, given, work, share):
        sent, waiting, listed = group.smem(), weights.smem(), merging.smem()
        held = cuda.local.array(config.vectors * regs.size, regs.element)  # my part of x[row], then of h
        other = cuda.local.array(config.vectors * regs.size, regs.element)  # of residual[row]
        frag = cuda.local.array(mem.vector, mem.number)
        w_frag, b_frag = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        place, coming = axes.place(), axes.place()
        tid, columns = cuda.threadIdx.x, columns_of_block(work.N, share)
        column = tid * mem.vector
        left, n = i32(columns.width - column), i64(columns.begin + column)  # columns from my first one on, which is n
        row, step = i64(cuda.blockIdx.x // config.cluster), i64(cuda.gridDim.x // config.cluster)
        axes.locate(coming, row, work.sizes)
        for v in range(config.vectors):
            load(held, other, v, given.x, given.residual, coming, n, left > v * STEP)
        merging.fill(listed, work.N, share)
        if tid == 0:
            group.init(sent)
            weights.init(waiting)
        start_mbarriers()
        if tid == 0:
            weights.copy(waiting, given.w, given.b, columns)

        i = i32(0)
        while row < work.M:
            axes.locate(place, row, work.sizes)
            axes.locate(coming, row + step, work.sizes)
            mine, left = moments.none(), i32(anew_i32(left))
            for v in range(config.vectors):
                regs.unpack(frag, 0, held, v)
                if variant.added:
                    add(frag, held, other, v)
                    summed_row = axes.start(place, to.summed) + n
                    mem.store_kept(to.summed.data, summed_row + v * STEP, left > v * STEP, frag, 0)
                mine = moments.add(mine, frag, i32(left > v * STEP))
            total = group.of_warp(mine.total) if variant.centred else num.zero
            squares = group.of_warp(moments.squares(mine, total * merging.my_inverse(listed)))
            group.send(sent, i, squares, total)
            weights.wait(waiting)
            inverse_N = num.one / mem.number(anew_i32(work.N))
            row_mean, found = num.zero, group.wait(sent, i)
            if variant.centred:
                row_mean, squares = merging.merge(sent, found, listed, inverse_N)
            else:
                squares = group.sum(sent, found)
            row_rstd = num.rsqrt(squares * inverse_N + work.eps)

            regs.anew(held)
            y_row = axes.start(place, to.y) + n
            for v in range(config.vectors):
                keep = left > v * STEP
                regs.unpack(frag, 0, held, v)
                weights.recall_w(w_frag, 0, waiting, column + v * STEP, work.offset)
                weights.recall_b(b_frag, 0, waiting, column + v * STEP)
                for c in range(mem.vector):
                    if variant.centred:
                        frag[c] -= row_mean
                    frag[c] *= row_rstd
                    if variant.w is not None:
                        frag[c] *= w_frag[c]
                    if variant.b is not None:
                        frag[c] += b_frag[c]
                mem.store_kept(to.y.data, y_row + v * STEP, keep, frag, 0)
                load(held, other, v, given.x, given.residual, coming, n, keep & (row + step < work.M))
            if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                if (column == 0) & (cluster_ctarank() == 0):
                    axes.write_statistics(place, to.mean, to.rstd, row_mean, row_rstd)
            row += step
            i = i32(i + 1)

    return norm_cluster_rows
