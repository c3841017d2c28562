"""The longest rows on sm_90: chunks of a row stay in shared memory while the next chunks are copied.

A producer warp copies chunks into the stages of a ring (cp.async.bulk), as early as stages are free. A cluster of
blocks shares a row:

    1  the operator reduces chunk after chunk
    2  warps send their two numbers to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    3  the operator writes every chunk again; the stage is free

The last chunks of a block's part of a row stay in their stages, as many as the Config keeps. Earlier chunks are copied
again, usually from L2. Meanwhile the other stages are filled with the next chunks. Copies are numbered in the order of
their start; a row has chunks + again copies (`Planned`).

Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1. Shared memory: stages * chunk * inputs * itemsize, and about
4 KiB. Registers: those of a chunk, and about 50.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype, itemsize
from ..compiler.backend import Kernel, Members, builds, cuda, i32, i64, kernel, members, noun, verb
from ..launch.step import Step
from ..row_walk import row_axes
from ..tile.ring import Stages, ring, start_cluster
from ..tile.storage import storage
from .cluster import share_of
from .exchange import in_cluster
from .operator import Keeping, Kind, RowOperator, argument_types, columns_of_block, inputs_of

MOST_STAGES = 32


@dataclass(frozen=True)
class ChunksConfig:
    """`warps` warps compute, one more copies. A stage has `vectors` 16-byte vectors per thread and input."""

    warps: int
    vectors: int
    stages: int
    cluster: int
    chunks: int  # chunks of a block's part of a row that stay in their stages: fewer than stages
    min_blocks: int = 1  # blocks for which an SM must have registers and shared memory

    @cached_property
    def readers(self) -> int:
        """Return the number of threads that compute."""
        return 32 * self.warps

    @cached_property
    def threads(self) -> int:
        return self.readers + 32

    def chunk(self, dtype: str) -> int:
        """Return the columns of a stage."""
        return self.readers * self.vectors * storage(dtype).vector

    def kept(self, dtype: str) -> int:
        """Return the columns of a row that a cluster keeps."""
        return self.cluster * self.chunks * self.chunk(dtype)

    def staged(self, dtype: str, inputs: int) -> Stages:
        """Return the layout of the ring: each stage has a chunk of every input."""
        return Stages(dtype, self.stages, inputs, 1, self.chunk(dtype))

    def static_bytes(self, dtype: str) -> int:
        """Return the most bytes of shared memory in addition to the stages: parts and mbarriers."""
        return 4 * self.warps * self.cluster * itemsize(compute_dtype(dtype)) + 16 * MOST_STAGES + 256


class Planned(NamedTuple):
    """A block's part of a row: `chunks` chunks, of which the first `again` are copied twice.

    In the first pass all chunks are copied, and the last ones stay. The second pass first reads and releases these, and
    then the others, which are copied again.
    """

    chunks: int
    again: int


@verb
def copied(planned, k):
    """Return the chunk of the k-th copy of a row. The second pass begins with copy number `again`."""
    return k if k < planned.chunks else k - planned.chunks


@noun
def chunks_of(config: ChunksConfig, kind: Any, op: RowOperator) -> Members:
    """The verbs of the chunks of rows."""
    mem, axes = storage(kind.dtype), row_axes(kind.rank)
    pipe = ring(config.staged(kind.dtype, kind.inputs), config.warps)
    STEP, inputs = config.readers * mem.vector, inputs_of(kind, op, config.vectors, True)

    @verb
    def plan(columns):
        """Plan the copies of my block's part of a row."""
        chunks = i32((max(columns.width, 0) + pipe.columns - 1) // pipe.columns)
        return Planned(chunks, max(chunks - config.chunks, 0))

    @verb
    def feed(smem, arrays, rows, row, step, columns):
        """Copy the chunks of all rows of a block; by one thread."""
        planned, i, place = plan(columns), i32(0), axes.place()
        while row < rows.M:
            axes.locate(place, row, rows.sizes)
            for k in range(planned.chunks + planned.again):
                at = copied(planned, k) * pipe.columns
                filling, n = pipe.acquire(smem, i, 1, min(pipe.columns, columns.width - at)), columns.begin + at
                pipe.copy(filling, 0, 0, arrays.x.data, axes.start(place, arrays.x) + n)
                if kind.inputs > 1:
                    pipe.copy(filling, 1, 0, arrays.other.data, axes.start(place, arrays.other) + n)
                i += 1
            row += step

    @verb
    def read(frag, other, smem, stage, left):
        """Read my part of a chunk. left: columns from my first column on."""
        index = pipe.begin(stage) + cuda.threadIdx.x * mem.vector
        for c in range(inputs.SIZE):
            frag[c] = op.FILL
        if kind.inputs > 1:
            for c in range(inputs.SIZE):
                other[c] = op.FILL
        for v in range(config.vectors):
            if left > v * STEP:
                mem.load_shared(frag, v * mem.vector, smem.tiles, index + v * STEP)
                if kind.inputs > 1:
                    mem.load_shared(other, v * mem.vector, smem.tiles, index + v * STEP + pipe.tile)
        inputs.add(frag, other)

    return members(locals(), pipe=pipe, fragments=inputs.fragments)


@builds
def build(config: ChunksConfig, kind: Any) -> Kernel:
    """Return the kernel (arrays, params, rows, share) of a `Kind`. share: columns of a block."""
    mem, axes = storage(kind.dtype), row_axes(kind.rank)
    group = in_cluster(mem.number, config.readers, 1, config.cluster)
    op = kind.operator(Keeping(group, config.readers, config.vectors, True))
    chunks = chunks_of(config, kind, op)
    STEP = config.readers * mem.vector  # columns between a thread's vectors

    @kernel(
        *argument_types(kind),
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
        name=kind.named("ring"),
    )
    def chunks_in_ring(arrays, params, rows, share):
        smem, sent, own = chunks.pipe.smem(), group.smem(), op.smem(params)
        tid, columns = cuda.threadIdx.x, columns_of_block(rows.N, share)
        lane, warp = tid % 32, tid // 32
        row, step = i64(cuda.blockIdx.x // config.cluster), cuda.gridDim.x // config.cluster
        if tid == 0:
            chunks.pipe.init(smem)
            group.init(sent)
        op.prepare(own, rows.N, share)
        start_cluster()

        if warp == config.warps:
            if lane == 0:
                chunks.feed(smem, arrays, rows, row, step, columns)
        else:
            planned, place = chunks.plan(columns), axes.place()
            i, row_round = i32(0), i32(0)  # numbers of the next copy and row
            frag, other = chunks.fragments()
            column = tid * mem.vector
            while row < rows.M:
                axes.locate(place, row, rows.sizes)
                known = op.none()
                for k in range(planned.chunks):
                    stage = chunks.pipe.wait(smem, i + k)
                    left = columns.width - (k * chunks.pipe.columns + column)
                    chunks.read(frag, other, smem, stage, left)
                    if k < planned.again:
                        chunks.pipe.release(smem, stage)
                    known = op.add(known, frag, other, i32((left + STEP - 1) // STEP))
                a, b = op.of_warp(known, own)
                group.send(sent, row_round, a, b)
                found = op.merge(sent, group.wait(sent, row_round), own, rows.N)

                for k in range(planned.chunks):
                    stage = chunks.pipe.wait(smem, i + planned.again + k)
                    at = copied(planned, planned.again + k) * chunks.pipe.columns + column
                    n, left = i64(columns.begin + at), columns.width - at
                    y_row, summed_row = axes.start(place, arrays.y) + n, axes.start(place, arrays.summed) + n
                    chunks.read(frag, other, smem, stage, left)
                    chunks.pipe.release(smem, stage)
                    for v in range(config.vectors):
                        inside = left > v * STEP
                        if op.ADDS:
                            mem.store_vector(arrays.summed.data, summed_row + v * STEP, inside, frag, v * mem.vector)
                        op.write(frag, v * mem.vector, other, found, own, n + v * STEP, inside)
                        mem.store_vector(arrays.y.data, y_row + v * STEP, inside, frag, v * mem.vector)
                if (tid == 0) & (columns.begin == 0):
                    op.end(found, own, place)
                i = i32(i + planned.chunks + planned.again)
                row += step
                row_round += 1

    return chunks_in_ring


def steps_of(config: ChunksConfig, kind: Kind, arguments: tuple[Any, ...]) -> list[Step]:
    """Return the launch for arguments (arrays, params, rows)."""
    rows = arguments[2]
    args = (*arguments, share_of(rows.N, config.cluster, rows.N, kind.dtype))
    nbytes = config.staged(kind.dtype, kind.inputs).nbytes
    return [Step(build(config, kind), (rows.M * config.cluster,), args, nbytes, resident=True)]
