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
from functools import cached_property, partial

from ...spec import ArrayMeta, Problem
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..device import Device
from ..plans import Choice
from ..step import Step
from ..tile.numbers import numbers
from ..tile.ring import Stages, cluster_ctarank, parts, ring, start_cluster
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

    def staged(self, dtype: str, arrays: int) -> Stages:
        """What the ring keeps: a chunk of every array in each stage."""
        return Stages(dtype, self.stages, arrays, 1, self.chunk(dtype))


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring(y, x, M, N, y_stride, x_stride): M rows of N columns, strides between rows in elements."""
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)
    pipe = ring(config.staged(dtype, 1), config.warps)
    meeting = parts(mem.number, num.send_pair, config.warps, config.cluster)
    SHARE = config.share(dtype)  # columns of a block
    ELEMENTS = config.vectors * mem.vector  # of a chunk that a thread has

    @kernel(
        pointer(mem.element), pointer(mem.element), i64, i32, i64, i64, threads=config.threads, cluster=config.cluster
    )
    def softmax_ring(y, x, M, N, y_stride, x_stride):
        smem, sent = pipe.smem(), meeting.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        first = cluster_ctarank() * SHARE
        end = min(N, first + SHARE)
        if tid == 0:
            pipe.init(smem)
            meeting.init(sent)
        start_cluster()
        row = i64(cuda.blockIdx.x // config.cluster)
        clusters = cuda.gridDim.x // config.cluster

        i = i32(0)  # copies so far
        if warp == config.warps:
            if lane == 0:
                while row < M:
                    for at in range(first, end, pipe.columns):
                        filling = pipe.acquire(smem, i, 1, min(pipe.columns, end - at))
                        pipe.copy(filling, 0, 0, x, row * x_stride + at)
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
                    at = first + k * pipe.columns
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] = num.minus_inf
                    if at < end:
                        stage = pipe.wait(smem, i)
                        for v in range(config.vectors):
                            column = (v * config.readers + tid) * mem.vector
                            if at + column < end:
                                index = pipe.begin(stage) + column
                                mem.load_shared(frag, k * ELEMENTS + v * mem.vector, smem.tiles, index)
                        pipe.release(smem, stage)
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
                meeting.send(sent, row_round, warp_max, warp_sum)
                begin = meeting.wait(sent, row_round)
                row_max = num.minus_inf
                for part in range(lane, meeting.size, 32):
                    row_max = num.maximum(row_max, sent.pairs[begin + 2 * part])
                base = num.base(lanes.max(row_max))
                row_sum = num.zero
                for part in range(lane, meeting.size, 32):
                    row_sum += sent.pairs[begin + 2 * part + 1] * num.exp(sent.pairs[begin + 2 * part] - base)
                inverse = num.one / lanes.sum(row_sum)

                for k in range(config.chunks):
                    rescale = num.exp(chunk_max[k] - base) * inverse
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] *= rescale
                    for v in range(config.vectors):
                        column = first + k * pipe.columns + (v * config.readers + tid) * mem.vector
                        mem.store_vector(y, row * y_stride + column, column < end, frag, k * ELEMENTS + v * mem.vector)
                row += clusters
                row_round += 1

    return softmax_ring


@builds
def build_backward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride)."""
    mem = storage(dtype)
    num, lanes = numbers(mem.number), lane_reductions(mem.number, 32)
    pipe = ring(config.staged(dtype, 2), config.warps)
    meeting = parts(mem.number, num.send_pair, config.warps, config.cluster)
    SHARE = config.share(dtype)  # columns of a block

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
        smem, sent = pipe.smem(), meeting.smem()  # a stage: columns of y, then the same of dy
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        first = cluster_ctarank() * SHARE
        end = min(N, first + SHARE)
        if tid == 0:
            pipe.init(smem)
            meeting.init(sent)
        start_cluster()
        row = i64(cuda.blockIdx.x // config.cluster)
        clusters = cuda.gridDim.x // config.cluster

        i = i32(0)  # copies so far
        if warp == config.warps:
            if lane == 0:
                while row < M:
                    for at in range(first, end, pipe.columns):
                        filling = pipe.acquire(smem, i, 1, min(pipe.columns, end - at))
                        pipe.copy(filling, 0, 0, y, row * y_stride + at)
                        pipe.copy(filling, 1, 0, dy, row * dy_stride + at)
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
                for at in range(first, end, pipe.columns):
                    stage = pipe.wait(smem, j)
                    chunk_dot = num.zero
                    for v in range(config.vectors):
                        column = (v * config.readers + tid) * mem.vector
                        if at + column < end:
                            index = pipe.begin(stage) + column
                            mem.load_shared(y_frag, v * mem.vector, smem.tiles, index)
                            mem.load_shared(dy_frag, v * mem.vector, smem.tiles, index + pipe.tile)
                            for c in range(mem.vector):
                                chunk_dot += y_frag[v * mem.vector + c] * dy_frag[v * mem.vector + c]
                    dot += chunk_dot
                    j += 1

                meeting.send(sent, row_round, lanes.sum(dot), num.zero)
                begin = meeting.wait(sent, row_round)
                dot = num.zero
                for part in range(lane, meeting.size, 32):
                    dot += sent.pairs[begin + 2 * part]
                dot = lanes.sum(dot)

                for at in range(first, end, pipe.columns):
                    stage = pipe.wait(smem, i)
                    for v in range(config.vectors):
                        column = (v * config.readers + tid) * mem.vector
                        if at + column < end:
                            index = pipe.begin(stage) + column
                            mem.load_shared(y_frag, v * mem.vector, smem.tiles, index)
                            mem.load_shared(dy_frag, v * mem.vector, smem.tiles, index + pipe.tile)
                    pipe.release(smem, stage)
                    for c in range(len(y_frag)):
                        y_frag[c] *= dy_frag[c] - dot
                    for v in range(config.vectors):
                        column = at + (v * config.readers + tid) * mem.vector
                        mem.store_vector(dx, row * dx_stride + column, column < end, y_frag, v * mem.vector)
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
    stage_bytes = RingConfig(warps, vectors, 1, 1, 1).staged(dtype, inputs).nbytes
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
    return [Step(kernel, (call.M * config.cluster,), args, config.staged(call.dtype, inputs).nbytes, resident=True)]
