"""softmax of long rows on sm_90: read once, kept in shared memory, while the next row is already on its way.

A cluster of blocks takes one row after another, each block a share of its columns, cut into chunks. A warp of its own
copies chunks into a ring of stages (cp.async.bulk), as far ahead as there is room; the other warps consume:

    1  for each chunk of the row: running maximum, sum in units of exp(maximum)          (the chunk stays)
    2  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    3  for each chunk again: y = exp(x - row maximum) / row sum, written; the chunk's stage is released

Backward is the same with y and dy in a stage and dot = sum(y * dy): dx = y * (dy - dot).
Milakov & Gimelshein 2018, arXiv:1805.02867, Algorithm 3 with a row that is read once.

Shared memory: stages * chunk * arrays * itemsize, and about 4 KiB. A block's share of a row must fit in its stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, u64
from ..tile import access, cluster_ctarank, lane_reductions, numbers, parts, ring, start_cluster, storage


@dataclass(frozen=True)
class RingConfig:
    """`warps` consume, one more copies. A stage holds `vectors` 16-byte vectors a thread of each array."""

    warps: int
    vectors: int
    stages: int
    cluster: int

    @property
    def threads(self) -> int:
        return 32 * self.warps + 32

    def chunk(self, dtype: str) -> int:
        """Columns of a stage."""
        return 32 * self.warps * self.vectors * storage(dtype).vector

    def columns(self, dtype: str) -> int:
        """Longest row: a stage is left to run ahead with."""
        return self.cluster * (self.stages - 1) * self.chunk(dtype)

    def shared_bytes(self, arrays: int) -> int:
        return self.stages * arrays * 32 * self.warps * self.vectors * 16


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring(y, x, M, N, share, y_stride, x_stride): a block has `share` columns of a row, whole chunks."""
    number, element, load_shared = storage(dtype).number, storage(dtype).element, storage(dtype).load_shared
    vector, _, store = access(dtype, True)
    maximum, exp, base_of = numbers(number).maximum, numbers(number).exp, numbers(number).base
    lanes_max, lanes_sum = lane_reductions(number, 32)
    stages = ring(config.stages, config.warps)
    init_ring, acquire, copy, wait, release = stages.init, stages.acquire, stages.copy, stages.wait, stages.release
    meeting = parts(number, numbers(number).send_pair, config.warps, config.cluster)
    init_parts, send, wait_parts = meeting.init, meeting.send, meeting.wait
    VECTOR, VECTORS, WARPS, STAGES, CLUSTER = vector, config.vectors, config.warps, config.stages, config.cluster
    THREADS, CHUNK, ELEMENTS = 32 * WARPS, config.chunk(dtype), VECTOR * VECTORS
    PARTS, PAIRS = meeting.count, 4 * meeting.count
    ITEMSIZE = element.bitwidth // 8
    NOTHING, ZERO, ONE = number(-inf), number(0), number(1)

    @kernel(
        pointer(element), pointer(element), i64, i32, i32, i64, i64, threads=config.threads, cluster=config.cluster
    )
    def softmax_ring(y, x, M, N, share, y_stride, x_stride):
        chunks = cuda.shared.array(0, element, alignment=16)
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        first = rank * share
        end = min(N, first + share)
        if tid == 0:
            init_ring(full, empty)
            init_parts(bells)
        start_cluster()
        row = i64(cuda.blockIdx.x // CLUSTER)
        clusters = cuda.gridDim.x // CLUSTER

        i = i32(0)  # copies so far
        if warp == WARPS:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * ITEMSIZE
                        stage = acquire(full, empty, i, nbytes)
                        copy(chunks, stage * CHUNK, x, row * x_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            frag = cuda.local.array(ELEMENTS, number)
            while row < M:
                my_max = NOTHING
                my_sum = ZERO
                j = i
                for at in range(first, end, CHUNK):
                    stage = wait(full, j)
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            load_shared(frag, v * VECTOR, chunks, stage * CHUNK + column)
                        else:
                            for c in range(VECTOR):
                                frag[v * VECTOR + c] = NOTHING
                    chunk_max = NOTHING
                    for c in range(ELEMENTS):
                        chunk_max = maximum(chunk_max, frag[c])
                    new_max = maximum(my_max, chunk_max)
                    base = base_of(new_max)
                    chunk_sum = ZERO
                    for c in range(ELEMENTS):
                        chunk_sum += exp(frag[c] - base)
                    my_sum = my_sum * exp(my_max - base) + chunk_sum
                    my_max = new_max
                    j += 1

                warp_max = lanes_max(my_max)
                warp_sum = lanes_sum(my_sum * exp(my_max - base_of(warp_max)))
                send(pairs, bells, row_round, rank, warp, lane, warp_max, warp_sum)
                begin = wait_parts(bells, row_round)
                row_max = NOTHING
                for part in range(lane, PARTS, 32):
                    row_max = maximum(row_max, pairs[begin + 2 * part])
                base = base_of(lanes_max(row_max))
                row_sum = ZERO
                for part in range(lane, PARTS, 32):
                    row_sum += pairs[begin + 2 * part + 1] * exp(pairs[begin + 2 * part] - base)
                rescale = ONE / lanes_sum(row_sum)

                for at in range(first, end, CHUNK):
                    stage = wait(full, i)
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            load_shared(frag, v * VECTOR, chunks, stage * CHUNK + column)
                    release(empty, stage)
                    for c in range(ELEMENTS):
                        frag[c] = exp(frag[c] - base) * rescale
                    for v in range(VECTORS):
                        column = at + (v * THREADS + tid) * VECTOR
                        store(y, row * y_stride + column, column < end, frag, v * VECTOR)
                    i += 1
                row += clusters
                row_round += 1

    return softmax_ring


@builds
def build_backward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_backward(dx, y, dy, M, N, share, dx_stride, y_stride, dy_stride)."""
    number, element, load_shared = storage(dtype).number, storage(dtype).element, storage(dtype).load_shared
    vector, _, store = access(dtype, True)
    _, lanes_sum = lane_reductions(number, 32)
    stages = ring(config.stages, config.warps)
    init_ring, acquire, copy, wait, release = stages.init, stages.acquire, stages.copy, stages.wait, stages.release
    meeting = parts(number, numbers(number).send_pair, config.warps, config.cluster)
    init_parts, send, wait_parts = meeting.init, meeting.send, meeting.wait
    VECTOR, VECTORS, WARPS, STAGES, CLUSTER = vector, config.vectors, config.warps, config.stages, config.cluster
    THREADS, CHUNK, ELEMENTS = 32 * WARPS, config.chunk(dtype), VECTOR * VECTORS
    PARTS, PAIRS = meeting.count, 4 * meeting.count
    ITEMSIZE = element.bitwidth // 8
    ZERO = number(0)

    @kernel(
        pointer(element),
        pointer(element),
        pointer(element),
        i64,
        i32,
        i32,
        i64,
        i64,
        i64,
        threads=config.threads,
        cluster=config.cluster,
    )
    def softmax_ring_backward(dx, y, dy, M, N, share, dx_stride, y_stride, dy_stride):
        chunks = cuda.shared.array(0, element, alignment=16)  # a stage: CHUNK of y, then CHUNK of dy
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
        bells = cuda.shared.array(2, u64)
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        rank = cluster_ctarank()
        first = rank * share
        end = min(N, first + share)
        if tid == 0:
            init_ring(full, empty)
            init_parts(bells)
        start_cluster()
        row = i64(cuda.blockIdx.x // CLUSTER)
        clusters = cuda.gridDim.x // CLUSTER

        i = i32(0)  # copies so far
        if warp == WARPS:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * ITEMSIZE
                        stage = acquire(full, empty, i, 2 * nbytes)
                        copy(chunks, 2 * stage * CHUNK, y, row * y_stride + at, nbytes, full, stage)
                        copy(chunks, (2 * stage + 1) * CHUNK, dy, row * dy_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            y_frag = cuda.local.array(ELEMENTS, number)
            dy_frag = cuda.local.array(ELEMENTS, number)
            while row < M:
                # dx = y * (dy - dot)  with  dot = sum(y * dy)
                dot = ZERO
                j = i
                for at in range(first, end, CHUNK):
                    stage = wait(full, j)
                    chunk_dot = ZERO
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            load_shared(y_frag, v * VECTOR, chunks, 2 * stage * CHUNK + column)
                            load_shared(dy_frag, v * VECTOR, chunks, (2 * stage + 1) * CHUNK + column)
                            for c in range(VECTOR):
                                chunk_dot += y_frag[v * VECTOR + c] * dy_frag[v * VECTOR + c]
                    dot += chunk_dot
                    j += 1

                send(pairs, bells, row_round, rank, warp, lane, lanes_sum(dot), ZERO)
                begin = wait_parts(bells, row_round)
                dot = ZERO
                for part in range(lane, PARTS, 32):
                    dot += pairs[begin + 2 * part]
                dot = lanes_sum(dot)

                for at in range(first, end, CHUNK):
                    stage = wait(full, i)
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            load_shared(y_frag, v * VECTOR, chunks, 2 * stage * CHUNK + column)
                            load_shared(dy_frag, v * VECTOR, chunks, (2 * stage + 1) * CHUNK + column)
                    release(empty, stage)
                    for c in range(ELEMENTS):
                        y_frag[c] *= dy_frag[c] - dot
                    for v in range(VECTORS):
                        column = at + (v * THREADS + tid) * VECTOR
                        store(dx, row * dx_stride + column, column < end, y_frag, v * VECTOR)
                    i += 1
                row += clusters
                row_round += 1

    return softmax_ring_backward
