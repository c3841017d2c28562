"""Rows of 32 KiB to 1 MiB on sm_90, which stay in the registers of a cluster.

    1  a thread loads its part of a row, `vectors` times 16 bytes, which stay unconverted in registers
    2  the operator reduces them, vector after vector, and each warp to two numbers
    3  warps send these to every block of the cluster, and merge all of them     (st.async, one mbarrier)
    4  the operator writes every vector; a vector of the cluster's next row then uses its registers

While a row's blocks load, or wait for each other, blocks of other rows on the same SM compute and write. The hardware
starts a cluster as soon as one fits, so all SMs are busy until the end. Params such as weights are copied to shared
memory once for the few rows of a cluster. With more rows per cluster, the last clusters would run alone for longer;
with fewer, weights would be read more often than x. 16-bit numbers are unpacked twice, and exponentials are computed
twice: unpacked numbers would take twice the registers, so only half of the blocks would fit. Plain stores are 1 to 2 %
faster here than stores with evict-first priority.

Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1. Shared memory: the params of a block's columns. Registers: 4
per vector and input, and 30 to 50 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, verb
from ..launch.arrays import align_up, cdiv
from ..launch.device import Device
from ..launch.step import Step
from ..row_walk import row_axes
from ..tile.packed import packed, recomputed_i32
from ..tile.ring import cluster_ctarank, start_mbarriers
from ..tile.storage import storage
from .exchange import in_cluster
from .operator import Keeping, Kind, argument_types, columns_of_block


@dataclass(frozen=True)
class ClusterRowsConfig:
    """A cluster keeps one row at a time in its registers."""

    row_threads: int  # threads of a block: a multiple of 32
    vectors: int  # 16-byte vectors of a row per thread
    cluster: int  # blocks that share a row
    min_blocks: int = 1  # blocks for which an SM must have registers
    rows: int = 1  # rows of a cluster, if there are enough

    @cached_property
    def threads(self) -> int:
        return self.row_threads

    def columns(self, dtype: str) -> int:
        """Return the most columns of a block."""
        return self.row_threads * self.vectors * storage(dtype).vector


@builds
def build(config: ClusterRowsConfig, kind: Any) -> Kernel:
    """Return the kernel (arrays, params, rows, share) of a `Kind`. share: columns of a block."""
    mem, regs = storage(kind.dtype), packed(kind.dtype)
    group = in_cluster(mem.number, config.row_threads, 1, config.cluster)
    op = kind.operator(Keeping(group, config.row_threads, 1, True, config.columns(kind.dtype)))
    axes = row_axes(kind.rank)
    STEP, SIZE = config.row_threads * mem.vector, config.vectors * regs.size  # columns between a thread's vectors
    OTHER = SIZE if kind.inputs > 1 else 1
    STAYS = config.rows > 1

    @verb
    def load(held, held_other, v, arrays, place, n, keep):
        """Load vector v of my part of a row. My columns begin at n."""
        regs.load(held, v, arrays.x.data, axes.start(place, arrays.x) + n + v * STEP, keep, op.FILL)
        if kind.inputs > 1:
            start = axes.start(place, arrays.other) + n
            regs.load(held_other, v, arrays.other.data, start + v * STEP, keep, op.FILL)

    @kernel(
        *argument_types(kind),
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
        name=kind.named("cluster_rows"),
    )
    def cluster_rows(arrays, params, rows, share):
        sent, own = group.smem(), op.smem(params)
        held = cuda.local.array(SIZE, regs.element)  # my part of x[row]
        held_other = cuda.local.array(OTHER, regs.element)
        frag, other = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        tid, columns = cuda.threadIdx.x, columns_of_block(rows.N, share)
        column = i32(tid * mem.vector)
        left, n = i32(columns.width - column), i64(columns.begin + column)  # columns from my first one, n, on
        row, step = i64(cuda.blockIdx.x // config.cluster), i64(cuda.gridDim.x // config.cluster)
        here, coming = axes.place(), axes.place()
        axes.locate(coming, row, rows.sizes)
        for v in range(config.vectors):
            load(held, held_other, v, arrays, coming, n, left > v * STEP)
        op.prepare(own, rows.N, share)
        if tid == 0:
            group.init(sent)
            op.init(own)
        start_mbarriers()
        if tid == 0:
            op.fetch(own, columns)

        i, more = i32(0), row < rows.M if STAYS else True
        while more:
            axes.locate(here, row, rows.sizes)
            known, left = op.none(), i32(recomputed_i32(left)) if STAYS else left
            for v in range(config.vectors):
                regs.unpack(frag, 0, held, v)
                if kind.inputs > 1:
                    regs.unpack(other, 0, held_other, v)
                if op.ADDS:
                    for c in range(mem.vector):
                        frag[c] = mem.rounded(frag[c] + other[c])
                    regs.pack(held, v, frag, 0)
                    at = axes.start(here, arrays.summed) + n + v * STEP
                    mem.store_kept(arrays.summed.data, at, left > v * STEP, frag, 0)
                known = op.add(known, frag, other, i32(left > v * STEP))
            a, b = op.of_warp(known, own)
            group.send(sent, i, a, b)
            op.wait(own)
            found = op.merge(sent, group.wait(sent, i), own, rows.N)

            axes.locate(coming, row + step, rows.sizes)
            regs.unpack_again(held)
            if kind.inputs > 1 and not op.ADDS:
                regs.unpack_again(held_other)
            for v in range(config.vectors):
                keep = left > v * STEP
                regs.unpack(frag, 0, held, v)
                if kind.inputs > 1 and not op.ADDS:
                    regs.unpack(other, 0, held_other, v)
                op.write(frag, 0, other, found, own, column + v * STEP, keep)
                mem.store_kept(arrays.y.data, axes.start(here, arrays.y) + n + v * STEP, keep, frag, 0)
                if STAYS:
                    load(held, held_other, v, arrays, coming, n, keep & (row + step < rows.M))
            if (column == 0) & (cluster_ctarank() == 0):
                op.end(found, own, here)
            if STAYS:
                row += step
                i = i32(i + 1)
            more = STAYS and row < rows.M

    return cluster_rows


def steps_of(config: ClusterRowsConfig, kind: Kind, arguments: tuple[Any, ...], device: Device) -> list[Step]:
    """Return the launch for arguments (arrays, params, rows)."""
    rows, columns = arguments[2], config.columns(kind.dtype)
    blocks = config.cluster * clusters_of(rows.M, config, device)
    args = (*arguments, share_of(rows.N, config.cluster, columns, kind.dtype))
    return [Step(build(config, kind), (blocks,), args, kind.shared_bytes(columns))]


def clusters_of(M: int, config: ClusterRowsConfig, device: Device) -> int:
    """Return the number of clusters for M rows: each has `config.rows` rows, or fewer so that all possible clusters
    run."""
    if config.rows == 1:
        return M
    at_once = max(device.sms * config.min_blocks // config.cluster, 1)
    return max(cdiv(M, config.rows), min(M, at_once))


def smallest_cluster(N: int, step: int, few: int, most: int, device: Device) -> tuple[int, int] | None:
    """Return the smallest cluster that can hold a row of N elements, and each thread's vectors; None if none can.

    step: elements of a block with one vector per thread. The largest cluster alone has more than `few` vectors, and at
    most `most`.
    """
    clusters = [cluster for cluster in (2, 4, 8, 16) if cluster <= device.max_cluster]
    cluster = next((cluster for cluster in clusters if cluster * few * step >= N), clusters[-1])
    return next(((cluster, vectors) for vectors in range(1, most + 1) if cluster * vectors * step >= N), None)


def share_of(N: int, cluster: int, columns: int, dtype: str) -> int:
    """Return the columns of a block, at most `columns`: whole lines of 128 bytes, if every block then has columns."""
    vector, each = storage(dtype).vector, cdiv(N, cluster)
    lines, vectors = (min(align_up(each, step), columns) for step in (8 * vector, vector))
    return lines if lines * (cluster - 1) < N else vectors
