"""Norms of rows of up to 2 MiB on sm_90: a row waits in the registers of a cluster, and the next one in shared memory.

Clusters stay, and take one row after another. w waits in shared memory, and beside it what there is room for of b and
of the next row. Else b comes from L2, two vectors ahead, and the next row to registers as they become free.

    1  the row before has been written: what waits of this one comes to registers, and what will wait of the next one is
       copied to its place (cp.async.bulk), for which it has all the time that a row takes
    2  of every few vectors: h * h, or the sum of h and of (h - their mean)^2; warps merge their threads' and send
       theirs to every block of the cluster, and merge all of them                            (st.async, one mbarrier)
    3  y = (h - mean) * rstd * (w + offset) + b

So memory is busy while a block computes or waits for its cluster, though an SM has no other one. Where rows of 2 MiB
wait in shared memory instead (ring_stages.py), w and b cost a quarter of the time. Where not all of a row waits there,
results are the first to leave L2, which is 2.5 % faster.

Ba, Kiros & Hinton 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467; Chan et al. 1979. Shared memory: w,
and b and the next row as the Config says. Registers: 4 a vector, 8 for b, and about 50.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..tile.numbers import numbers
from ..tile.packed import anew_i32, packed
from ..tile.ring import ring, start_cluster
from ..tile.storage import storage
from .merging import listed_means
from .moments import thread_moments
from .staging import ClusterAheadConfig, columns_of_block, shared_weights
from .variant import Variant, forward_types
from .verbs import cluster_sums, norm_axes

FEW = 2  # vectors whose mean is made at once
AHEAD = 2  # vectors whose b is under way from L2


class Result(NamedTuple):
    """Where a row goes, and by which numbers."""

    y: Any
    start: Any  # of my columns in y
    mean: Any
    rstd: Any


@builds
def build_forward(config: ClusterAheadConfig, variant: Variant) -> Kernel:
    """norm_cluster_ahead(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share): M rows of N."""
    mem, num, regs = storage(variant.dtype), numbers(storage(variant.dtype).number), packed(variant.dtype)
    axes, weights = norm_axes(variant), shared_weights(config, variant)
    pipe = ring(config.layout(variant).stages, config.row_warps)
    group = cluster_sums(mem.number, config.row_threads, 1, config.cluster)
    merging, moments = listed_means(config, variant), thread_moments(variant, FEW)
    STEP, STAGED, VECTORS = config.step(variant.dtype), config.staged, config.vectors
    B_COMES = variant.b is not None and not config.b_shared
    store = mem.store_kept if config.b_shared else mem.store_vector

    @verb
    def send_next(smem, i, x, x_row, columns):
        """The first part of the row behind number i, to shared memory, as soon as nobody reads what was there."""
        if cuda.threadIdx.x == 0:
            filling = pipe.acquire(smem, i, 1, min(columns.width, pipe.columns))
            pipe.copy(filling, 0, 0, x.data, x_row + columns.begin)

    @verb
    def take(held, smem, i, present):
        """The same to registers, when it is there."""
        stage = pipe.wait(smem, i)
        index = pipe.begin(stage) + i32(cuda.threadIdx.x * mem.vector)
        for v in range(STAGED):
            if present > i32(v):
                regs.load_shared(held, v, smem.tiles, index + v * STEP)
        pipe.release(smem, stage)

    @verb
    def moments_of(held, present):
        """Those of all that a thread has, `present` vectors; behind them are zeros."""
        frag = cuda.local.array(FEW * mem.vector, mem.number)
        found, present = moments.none(), i32(anew_i32(present))
        for first in range(0, VECTORS, FEW):
            for v in range(FEW):
                if first + v < VECTORS:
                    regs.unpack(frag, v * mem.vector, held, first + v)
                else:
                    for c in range(mem.vector):
                        frag[v * mem.vector + c] = num.zero
            found = moments.add(found, frag, i32(present - first))
        return found

    @verb
    def send(sent, i, found, my_inverse):
        """The sum of my warp, and that of the squares about its mean."""
        total = group.of_warp(found.total) if variant.centred else num.zero
        group.send(sent, i, group.of_warp(moments.squares(found, total * my_inverse)), total)

    @verb
    def fetch_b(b_held, turn, b, n, v, present):
        """b of vector v, the turn-th that is written."""
        if B_COMES:
            regs.load(b_held, turn % AHEAD, b, n + v * STEP, present > i32(v), num.zero)

    @verb
    def write(result, held, v, turn, weighting, waiting, column, present):
        """y of vector v, the turn-th that is written."""
        frag = cuda.local.array(mem.vector, mem.number)
        w_frag, b_frag = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        b_held, b, n, offset = weighting
        weights.recall_w(w_frag, 0, waiting, column + v * STEP, offset)
        weights.recall_b(b_frag, 0, waiting, column + v * STEP)
        if B_COMES:
            regs.unpack(b_frag, 0, b_held, turn % AHEAD)
            then = v + AHEAD if v + AHEAD < VECTORS else v + AHEAD - VECTORS
            if turn + AHEAD < VECTORS:
                fetch_b(b_held, turn, b, n, then, present)
        regs.unpack(frag, 0, held, v)
        for c in range(mem.vector):
            if variant.centred:
                frag[c] -= result.mean
            frag[c] *= result.rstd
            if variant.w is not None:
                frag[c] *= w_frag[c]
            if variant.b is not None:
                frag[c] += b_frag[c]
        store(result.y.data, result.start + v * STEP, present > i32(v), frag, 0)

    @kernel(*forward_types(variant), i32, threads=config.threads, min_blocks=config.min_blocks, cluster=config.cluster)
    def norm_cluster_ahead(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset, share):
        smem, sent, waiting, listed = pipe.smem(), group.smem(), weights.smem(), merging.smem()
        held = cuda.local.array(VECTORS * regs.size, regs.element)  # my part of x[row]
        b_held = cuda.local.array(AHEAD * regs.size, regs.element)
        place, coming = axes.place(), axes.place()
        tid, columns = cuda.threadIdx.x, columns_of_block(N, share)
        column = i32(tid * mem.vector)
        n, present = i32(columns.begin + column), i32(max((columns.width - column + STEP - 1) // STEP, 0))  # my vectors
        row, step = i32(cuda.blockIdx.x // config.cluster), i32(cuda.gridDim.x // config.cluster)
        axes.locate(coming, i64(row), sizes)
        for v in range(VECTORS):
            regs.load(held, v, x.data, axes.start(coming, x) + n + v * STEP, present > i32(v), num.zero)
        merging.fill(listed, N, share)
        if tid == 0:
            pipe.init(smem)
            group.init(sent)
            weights.init(waiting)
        start_cluster()
        if tid == 0:
            weights.copy(waiting, w, b, columns)

        i = i32(0)
        weights.wait(waiting)
        while row < M:
            axes.locate(coming, i64(row + step), sizes)
            more, x_row = row + step < M, axes.start(coming, x)
            if i > 0:
                take(held, smem, i32(i - 1), present)
            if more:
                send_next(smem, i, x, x_row, columns)
            send(sent, i, moments_of(held, present), merging.my_inverse(listed))

            present = i32(anew_i32(present))
            for turn in range(AHEAD):
                fetch_b(b_held, turn, b, n, (STAGED + turn) % VECTORS, present)
            inverse_N = num.one / mem.number(anew_i32(N))
            row_mean, squares = merging.merge(sent, group.wait(sent, i), listed, inverse_N)
            row_rstd = num.rsqrt(squares * inverse_N + eps)
            axes.locate(place, i64(row), sizes)
            if variant.statistics:  # noqa: SIM102 Numba leaves out what an if on a constant guards
                if n == 0:
                    axes.write_statistics(place, mean, rstd, row_mean, row_rstd)
            regs.anew(held)
            result = Result(y, axes.start(place, y) + n, row_mean, row_rstd)
            weighting = b_held, b, n, offset
            for v in range(STAGED, VECTORS):
                write(result, held, v, v - STAGED, weighting, waiting, column, present)
                regs.load(held, v, x.data, x_row + n + v * STEP, more & (present > i32(v)), num.zero)
            for v in range(STAGED):
                write(result, held, v, v + VECTORS - STAGED, weighting, waiting, column, present)
            row, i = i32(row + step), i32(i + 1)

    return norm_cluster_ahead
