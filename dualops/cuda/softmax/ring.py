"""softmax of long rows on sm_90: read once, while the next rows are already on their way.

A cluster of blocks takes one row after another, each block a share of its columns, cut into chunks. A warp of its own
copies chunks into a ring of stages (cp.async.bulk), as far ahead as there is room; the other warps consume. Forward:

    1  for each chunk: to registers, the stage is free again; maximum, e = exp(x - maximum), the sum of e
    2  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    3  for each chunk: y = e * exp(chunk maximum - row maximum) / row sum

Backward has two arrays to keep and nothing to compute twice: a row stays in its stages, y beside dy, and is read again.

    1  for each chunk: dot += sum(y * dy)
    2  warps send and sum their dots
    3  for each chunk again: dx = y * (dy - dot); the stage is free

Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1.
Shared memory: stages * chunk * arrays * itemsize, and about 4 KiB. Registers: a thread's share of a row, and about 50.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, u64
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, parts, ring, start_cluster
from ..tile.rows import lane_reductions
from ..tile.storage import storage


@dataclass(frozen=True)
class RingConfig:
    """`warps` consume, one more copies. A stage holds `vectors` 16-byte vectors a thread of each array."""

    warps: int
    vectors: int
    stages: int
    cluster: int
    chunks: int  # of a block's share of a row, at most

    @cached_property
    def readers(self) -> int:
        """Threads that consume."""
        return 32 * self.warps

    @cached_property
    def threads(self) -> int:
        return self.readers + 32

    def chunk(self, dtype: str) -> int:
        """Columns of a stage."""
        return self.readers * self.vectors * storage(dtype).vector

    def share(self, dtype: str) -> int:
        """Columns of a block."""
        return self.chunks * self.chunk(dtype)

    def shared_bytes(self, arrays: int) -> int:
        return self.stages * arrays * self.readers * self.vectors * 16


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring(y, x, M, N, y_stride, x_stride): M rows of N columns, strides between rows in elements."""
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)
    pipe = ring(config.stages, config.warps)
    meeting = parts(mem.number, num.send_pair, config.warps, config.cluster)
    CHUNK, SHARE = config.chunk(dtype), config.share(dtype)  # columns of a stage and of a block
    ELEMENTS = config.vectors * mem.vector  # of a chunk that a thread has

    @kernel(
        pointer(mem.element), pointer(mem.element), i64, i32, i64, i64, threads=config.threads, cluster=config.cluster
    )
    def softmax_ring(y, x, M, N, y_stride, x_stride):
        chunks = cuda.shared.array(0, mem.element, alignment=16)
        pairs = cuda.shared.array(4 * meeting.size, mem.number, alignment=16)
        full = cuda.shared.array(config.stages, u64)
        empty = cuda.shared.array(config.stages, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        first = rank * SHARE
        end = min(N, first + SHARE)
        if tid == 0:
            pipe.init(full, empty)
            meeting.init(bells)
        start_cluster()
        row = i64(cuda.blockIdx.x // config.cluster)
        clusters = cuda.gridDim.x // config.cluster

        i = i32(0)  # copies so far
        if warp == config.warps:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * mem.itemsize
                        stage = pipe.acquire(full, empty, i, nbytes)
                        pipe.copy(chunks, stage * CHUNK, x, row * x_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            frag = cuda.local.array(config.chunks * ELEMENTS, mem.number)  # my part of x[row], then e
            chunk_max = cuda.local.array(config.chunks, mem.number)
            while row < M:
                my_max = num.minus_inf
                my_sum = num.zero
                for k in range(config.chunks):
                    at = first + k * CHUNK
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] = num.minus_inf
                    if at < end:
                        stage = pipe.wait(full, i)
                        for v in range(config.vectors):
                            column = (v * config.readers + tid) * mem.vector
                            if at + column < end:
                                mem.load_shared(frag, k * ELEMENTS + v * mem.vector, chunks, stage * CHUNK + column)
                        pipe.release(empty, stage)
                        i += 1
                    chunk_max[k] = num.minus_inf
                    for c in range(ELEMENTS):
                        chunk_max[k] = num.maximum(chunk_max[k], frag[k * ELEMENTS + c])
                    base = num.base(chunk_max[k])
                    chunk_sum = num.zero
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] = num.exp(frag[k * ELEMENTS + c] - base)
                        chunk_sum += frag[k * ELEMENTS + c]
                    new_max = num.maximum(my_max, chunk_max[k])
                    base = num.base(new_max)
                    my_sum = my_sum * num.exp(my_max - base) + chunk_sum * num.exp(chunk_max[k] - base)
                    my_max = new_max

                warp_max = lanes.max(my_max)
                warp_sum = lanes.sum(my_sum * num.exp(my_max - num.base(warp_max)))
                meeting.send(pairs, bells, row_round, rank, warp, lane, warp_max, warp_sum)
                begin = meeting.wait(bells, row_round)
                row_max = num.minus_inf
                for part in range(lane, meeting.size, 32):
                    row_max = num.maximum(row_max, pairs[begin + 2 * part])
                base = num.base(lanes.max(row_max))
                row_sum = num.zero
                for part in range(lane, meeting.size, 32):
                    row_sum += pairs[begin + 2 * part + 1] * num.exp(pairs[begin + 2 * part] - base)
                inverse = num.one / lanes.sum(row_sum)

                for k in range(config.chunks):
                    rescale = num.exp(chunk_max[k] - base) * inverse
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] *= rescale
                    for v in range(config.vectors):
                        column = first + k * CHUNK + (v * config.readers + tid) * mem.vector
                        mem.store_vector(y, row * y_stride + column, column < end, frag, k * ELEMENTS + v * mem.vector)
                row += clusters
                row_round += 1

    return softmax_ring


@builds
def build_backward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride)."""
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)
    pipe = ring(config.stages, config.warps)
    meeting = parts(mem.number, num.send_pair, config.warps, config.cluster)
    CHUNK, SHARE = config.chunk(dtype), config.share(dtype)  # columns of a stage and of a block

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        pointer(mem.element),
        i64,
        i32,
        i64,
        i64,
        i64,
        threads=config.threads,
        cluster=config.cluster,
    )
    def softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride):
        chunks = cuda.shared.array(0, mem.element, alignment=16)  # a stage: CHUNK of y, then CHUNK of dy
        pairs = cuda.shared.array(4 * meeting.size, mem.number, alignment=16)
        full = cuda.shared.array(config.stages, u64)
        empty = cuda.shared.array(config.stages, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        first = rank * SHARE
        end = min(N, first + SHARE)
        if tid == 0:
            pipe.init(full, empty)
            meeting.init(bells)
        start_cluster()
        row = i64(cuda.blockIdx.x // config.cluster)
        clusters = cuda.gridDim.x // config.cluster

        i = i32(0)  # copies so far
        if warp == config.warps:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * mem.itemsize
                        stage = pipe.acquire(full, empty, i, 2 * nbytes)
                        pipe.copy(chunks, 2 * stage * CHUNK, y, row * y_stride + at, nbytes, full, stage)
                        pipe.copy(chunks, (2 * stage + 1) * CHUNK, dy, row * dy_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            y_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            dy_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            while row < M:
                # dx = y * (dy - dot)  with  dot = sum(y * dy)
                dot = num.zero
                j = i
                for at in range(first, end, CHUNK):
                    stage = pipe.wait(full, j)
                    chunk_dot = num.zero
                    for v in range(config.vectors):
                        column = (v * config.readers + tid) * mem.vector
                        if at + column < end:
                            mem.load_shared(y_frag, v * mem.vector, chunks, 2 * stage * CHUNK + column)
                            mem.load_shared(dy_frag, v * mem.vector, chunks, (2 * stage + 1) * CHUNK + column)
                            for c in range(mem.vector):
                                chunk_dot += y_frag[v * mem.vector + c] * dy_frag[v * mem.vector + c]
                    dot += chunk_dot
                    j += 1

                meeting.send(pairs, bells, row_round, rank, warp, lane, lanes.sum(dot), num.zero)
                begin = meeting.wait(bells, row_round)
                dot = num.zero
                for part in range(lane, meeting.size, 32):
                    dot += pairs[begin + 2 * part]
                dot = lanes.sum(dot)

                for at in range(first, end, CHUNK):
                    stage = pipe.wait(full, i)
                    for v in range(config.vectors):
                        column = (v * config.readers + tid) * mem.vector
                        if at + column < end:
                            mem.load_shared(y_frag, v * mem.vector, chunks, 2 * stage * CHUNK + column)
                            mem.load_shared(dy_frag, v * mem.vector, chunks, (2 * stage + 1) * CHUNK + column)
                    pipe.release(empty, stage)
                    for c in range(len(y_frag)):
                        y_frag[c] *= dy_frag[c] - dot
                    for v in range(config.vectors):
                        column = at + (v * config.readers + tid) * mem.vector
                        mem.store_vector(dx, row * dx_stride + column, column < end, y_frag, v * mem.vector)
                    i += 1
                row += clusters
                row_round += 1

    return softmax_ring_backward
