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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ...spec import ArrayMeta, Problem
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer, u64
from ..device import Device
from ..plans import Choice
from ..step import Step
from ..tile.numbers import numbers
from ..tile.ring import cluster_ctarank, parts, ring, start_cluster
from ..tile.rows import lane_reductions
from ..tile.storage import storage
from .arguments import Call


@dataclass(frozen=True)
class RingConfig:
    """`warps` consume, one more copies. A stage holds `vectors` 16-byte vectors a thread of each array."""

    warps: int
    vectors: int
    stages: int
    cluster: int
    chunks: int  # of a block's share of a row, at most

    @property
    def threads(self) -> int:
        return 32 * self.warps + 32

    def chunk(self, dtype: str) -> int:
        """Columns of a stage."""
        return 32 * self.warps * self.vectors * storage(dtype).vector

    def share(self, dtype: str) -> int:
        """Columns of a block."""
        return self.chunks * self.chunk(dtype)

    def shared_bytes(self, arrays: int) -> int:
        return self.stages * arrays * 32 * self.warps * self.vectors * 16


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring(y, x, M, N, y_stride, x_stride): M rows of N columns, strides between rows in elements."""
    mem, number = storage(dtype), storage(dtype).number
    num, lanes = numbers(number), lane_reductions(number, 32)
    pipe = ring(config.stages, config.warps)
    meeting = parts(number, num.send_pair, config.warps, config.cluster)
    VECTOR, VECTORS, WARPS, STAGES, CLUSTER = mem.vector, config.vectors, config.warps, config.stages, config.cluster
    THREADS, CHUNK, CHUNKS, SHARE = 32 * WARPS, config.chunk(dtype), config.chunks, config.share(dtype)
    ELEMENTS = VECTOR * VECTORS  # of a chunk that a thread has
    KEPT = ELEMENTS * CHUNKS
    PARTS, PAIRS = meeting.size, 4 * meeting.size
    ITEMSIZE = mem.element.bitwidth // 8

    @kernel(
        pointer(mem.element), pointer(mem.element), i64, i32, i64, i64, threads=config.threads, cluster=config.cluster
    )
    def softmax_ring(y, x, M, N, y_stride, x_stride):
        chunks = cuda.shared.array(0, mem.element, alignment=16)
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
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
        row = i64(cuda.blockIdx.x // CLUSTER)
        clusters = cuda.gridDim.x // CLUSTER

        i = i32(0)  # copies so far
        if warp == WARPS:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * ITEMSIZE
                        stage = pipe.acquire(full, empty, i, nbytes)
                        pipe.copy(chunks, stage * CHUNK, x, row * x_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            frag = cuda.local.array(KEPT, number)  # my part of x[row], then e
            chunk_max = cuda.local.array(CHUNKS, number)
            while row < M:
                my_max = num.minus_inf
                my_sum = num.zero
                for k in range(CHUNKS):
                    at = first + k * CHUNK
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] = num.minus_inf
                    if at < end:
                        stage = pipe.wait(full, i)
                        for v in range(VECTORS):
                            column = (v * THREADS + tid) * VECTOR
                            if at + column < end:
                                mem.load_shared(frag, k * ELEMENTS + v * VECTOR, chunks, stage * CHUNK + column)
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
                for part in range(lane, PARTS, 32):
                    row_max = num.maximum(row_max, pairs[begin + 2 * part])
                base = num.base(lanes.max(row_max))
                row_sum = num.zero
                for part in range(lane, PARTS, 32):
                    row_sum += pairs[begin + 2 * part + 1] * num.exp(pairs[begin + 2 * part] - base)
                inverse = num.one / lanes.sum(row_sum)

                for k in range(CHUNKS):
                    rescale = num.exp(chunk_max[k] - base) * inverse
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] *= rescale
                    for v in range(VECTORS):
                        column = first + k * CHUNK + (v * THREADS + tid) * VECTOR
                        mem.store_vector(y, row * y_stride + column, column < end, frag, k * ELEMENTS + v * VECTOR)
                row += clusters
                row_round += 1

    return softmax_ring


@builds
def build_backward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride)."""
    mem, number = storage(dtype), storage(dtype).number
    num, lanes = numbers(number), lane_reductions(number, 32)
    pipe = ring(config.stages, config.warps)
    meeting = parts(number, num.send_pair, config.warps, config.cluster)
    VECTOR, VECTORS, WARPS, STAGES, CLUSTER = mem.vector, config.vectors, config.warps, config.stages, config.cluster
    THREADS, CHUNK, SHARE, ELEMENTS = 32 * WARPS, config.chunk(dtype), config.share(dtype), VECTOR * VECTORS
    PARTS, PAIRS = meeting.size, 4 * meeting.size
    ITEMSIZE = mem.element.bitwidth // 8

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
        pairs = cuda.shared.array(PAIRS, number, alignment=16)
        full = cuda.shared.array(STAGES, u64)
        empty = cuda.shared.array(STAGES, u64)
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
        row = i64(cuda.blockIdx.x // CLUSTER)
        clusters = cuda.gridDim.x // CLUSTER

        i = i32(0)  # copies so far
        if warp == WARPS:
            if lane == 0:
                while row < M:
                    for at in range(first, end, CHUNK):
                        nbytes = min(CHUNK, end - at) * ITEMSIZE
                        stage = pipe.acquire(full, empty, i, 2 * nbytes)
                        pipe.copy(chunks, 2 * stage * CHUNK, y, row * y_stride + at, nbytes, full, stage)
                        pipe.copy(chunks, (2 * stage + 1) * CHUNK, dy, row * dy_stride + at, nbytes, full, stage)
                        i += 1
                    row += clusters
        else:
            row_round = i32(0)
            y_frag = cuda.local.array(ELEMENTS, number)
            dy_frag = cuda.local.array(ELEMENTS, number)
            while row < M:
                # dx = y * (dy - dot)  with  dot = sum(y * dy)
                dot = num.zero
                j = i
                for at in range(first, end, CHUNK):
                    stage = pipe.wait(full, j)
                    chunk_dot = num.zero
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            mem.load_shared(y_frag, v * VECTOR, chunks, 2 * stage * CHUNK + column)
                            mem.load_shared(dy_frag, v * VECTOR, chunks, (2 * stage + 1) * CHUNK + column)
                            for c in range(VECTOR):
                                chunk_dot += y_frag[v * VECTOR + c] * dy_frag[v * VECTOR + c]
                    dot += chunk_dot
                    j += 1

                meeting.send(pairs, bells, row_round, rank, warp, lane, lanes.sum(dot), num.zero)
                begin = meeting.wait(bells, row_round)
                dot = num.zero
                for part in range(lane, PARTS, 32):
                    dot += pairs[begin + 2 * part]
                dot = lanes.sum(dot)

                for at in range(first, end, CHUNK):
                    stage = pipe.wait(full, i)
                    for v in range(VECTORS):
                        column = (v * THREADS + tid) * VECTOR
                        if at + column < end:
                            mem.load_shared(y_frag, v * VECTOR, chunks, 2 * stage * CHUNK + column)
                            mem.load_shared(dy_frag, v * VECTOR, chunks, (2 * stage + 1) * CHUNK + column)
                    pipe.release(empty, stage)
                    for c in range(ELEMENTS):
                        y_frag[c] *= dy_frag[c] - dot
                    for v in range(VECTORS):
                        column = at + (v * THREADS + tid) * VECTOR
                        mem.store_vector(dx, row * dx_stride + column, column < end, y_frag, v * VECTOR)
                    i += 1
                row += clusters
                row_round += 1

    return softmax_ring_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The smallest cluster that holds a row, if any does."""
    return _choices(Call(problem, results), build_forward, 1, device)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The same of the gradient."""
    return _choices(Call(problem, results), build_backward, 2, device)


# (warps, vectors, most chunks a share) of the forward ring, which reads one array, and of the backward ring, which
# reads two. Shares of the roof, bf16, H200, 2026-11-21, at 8192 x 65536 and 2048 x 262144: forward 0.91 and 0.75,
# backward 0.97 and 0.99; two readings, with plain stores: 0.64 and 0.63, 0.59 and 0.58
RING_SHAPE = {1: (15, 3, 3), 2: (12, 2, 0)}
RING_OVERHEAD = 8 << 10  # bytes of shared memory for barriers and parts, at most


def _choices(call: Call, build: Callable[..., Kernel], inputs: int, device: Device) -> Iterator[Choice]:
    if not call.contiguous:
        return
    for config in _ring_configs(call.N, call.dtype, call.aligned, inputs, device):
        make = partial(_steps, call, build, config, inputs)
        yield Choice("sm90", config, "a row waits in shared memory, and the next is on its way", make)


def _ring_configs(N: int, dtype: str, aligned: bool, inputs: int, device: Device) -> Iterator[RingConfig]:
    """The smallest cluster that can keep a row: in registers going forward, in its stages going back."""
    if not aligned or not device.has_bulk_copies:
        return
    warps, vectors, chunks = RING_SHAPE[inputs] if device.name != "simulator" else (4, 1, 3)
    stage_bytes = RingConfig(warps, vectors, 1, 1, 1).shared_bytes(inputs)
    stages = min((device.shared_memory_per_block - RING_OVERHEAD) // stage_bytes, 32)
    if inputs == 2:
        chunks = stages - 1  # one to run ahead with
    for cluster in (1, 2, 4, 8):
        config = RingConfig(warps, vectors, stages, cluster, chunks)
        if cluster * config.share(dtype) >= N and cluster <= device.max_cluster:
            needed = -(-N // (cluster * config.chunk(dtype)))  # an even share for every block
            yield replace(config, chunks=needed)
            return


def _steps(call: Call, build: Callable[..., Kernel], config: RingConfig, inputs: int) -> list[Step]:
    kernel, args = build(config, call.dtype), (*call.metas, call.M, call.N, *call.row_strides)
    return [Step(kernel, (call.M * config.cluster,), args, config.shared_bytes(inputs), resident=True)]
