"""softmax of the longest rows and its gradient on sm_90: a row stays in shared memory until it is written.

Clusters, chunks and the ring are those of ring.py. Of a block's share of a row, the last
chunks stay in their stages, as many as the Config keeps. The chunks before them are copied again, usually from L2.
Meanwhile the other stages fill with the next chunks. Forward:

    1  for each chunk: the running maximum, and the sum of exp(x - maximum)
    2  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    3  for each chunk again: y = exp(x - row maximum) / row sum; the stage is free

Backward, the same with two arrays:

    1  for each chunk: dot += sum(y * dy)
    2  warps send and sum their dots
    3  for each chunk again: dx = y * (dy - dot); the stage is free

Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1.
Shared memory: stages * chunk * arrays * itemsize, and about 4 KiB. Registers: those of a chunk, and about 50.
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer, verb
from ..tile.numbers import numbers
from ..tile.ring import Ring, ring, start_cluster
from ..tile.storage import storage
from .chunk_order import chunk_order
from .ring_config import RingConfig, rows


def feeding(config: RingConfig, pipe: Ring, arrays: int) -> Callable[..., None]:
    """The verb (smem, block, M, arrays, strides): copy the chunks of all rows of a block, by one thread."""
    order = chunk_order(pipe.columns, config.chunks)

    @verb
    def feed(smem, block, M, given, strides):
        planned, row, i = order.plan(block.end - block.first), block.row, i32(0)
        while row < M:
            for k in range(planned.chunks + planned.again):
                at = block.first + order.copied(planned, k) * pipe.columns
                filling = pipe.acquire(smem, i, 1, min(pipe.columns, block.end - at))
                pipe.copy(filling, 0, 0, given[0], row * strides[0] + at)
                if arrays > 1:
                    pipe.copy(filling, 1, 0, given[1], row * strides[1] + at)
                i += 1
            row += block.step

    return feed


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_stages(y, x, M, N, y_stride, x_stride, share): M rows of N columns.

    share: columns of a block.
    """
    mem = storage(dtype)
    num, deal = numbers(mem.number), rows(config, dtype)
    pipe = ring(config.staged(dtype, 1), config.warps)
    order, feed = chunk_order(pipe.columns, config.chunks), feeding(config, pipe, 1)
    STEP = config.readers * mem.vector  # columns between a thread's vectors

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        i64,
        i32,
        i64,
        i64,
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
    )
    def softmax_ring_stages(y, x, M, N, y_stride, x_stride, share):
        smem, sent = pipe.smem(), deal.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        block = deal.block(N, share)
        if tid == 0:
            pipe.init(smem)
            deal.init(sent)
        start_cluster()

        if warp == config.warps:
            if lane == 0:
                feed(smem, block, M, (x,), (x_stride,))
        else:
            planned, row = order.plan(block.end - block.first), block.row
            i, row_round = i32(0), i32(0)  # copies and rows so far
            frag = cuda.local.array(config.vectors * mem.vector, mem.number)  # my part of a chunk
            while row < M:
                my_max = num.minus_inf
                my_sum = num.zero
                for k in range(planned.chunks):
                    stage = pipe.wait(smem, i + k)
                    left = block.end - (block.first + k * pipe.columns + tid * mem.vector)
                    index = pipe.begin(stage) + tid * mem.vector
                    for c in range(len(frag)):
                        frag[c] = num.minus_inf
                    for v in range(config.vectors):
                        if left > v * STEP:
                            mem.load_shared(frag, v * mem.vector, smem.tiles, index + v * STEP)
                    if k < planned.again:
                        pipe.release(smem, stage)
                    chunk_max = num.minus_inf
                    for c in range(len(frag)):
                        chunk_max = num.maximum(chunk_max, frag[c])
                    new_max = num.maximum(my_max, chunk_max)
                    base = num.base(new_max)
                    chunk_sum = num.zero
                    for c in range(len(frag)):
                        chunk_sum += num.exp(frag[c] - base)
                    my_sum = my_sum * num.exp(my_max - base) + chunk_sum
                    my_max = new_max

                deal.send(sent, row_round, my_max, my_sum)
                base, inverse = deal.merge(sent, row_round)
                for k in range(planned.chunks):
                    stage = pipe.wait(smem, i + planned.again + k)
                    at = block.first + order.second(planned, k) * pipe.columns + tid * mem.vector
                    index = pipe.begin(stage) + tid * mem.vector
                    for v in range(config.vectors):
                        if at + v * STEP < block.end:
                            mem.load_shared(frag, v * mem.vector, smem.tiles, index + v * STEP)
                    pipe.release(smem, stage)
                    for c in range(len(frag)):
                        frag[c] = num.exp(frag[c] - base) * inverse
                    for v in range(config.vectors):
                        column = at + v * STEP
                        mem.store_vector(y, row * y_stride + column, column < block.end, frag, v * mem.vector)
                i = i32(i + planned.chunks + planned.again)
                row += block.step
                row_round += 1

    return softmax_ring_stages


@builds
def build_backward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride, share)."""
    mem = storage(dtype)
    num, deal = numbers(mem.number), rows(config, dtype)
    pipe = ring(config.staged(dtype, 2), config.warps)  # a stage: columns of y, then these columns of dy
    order, feed = chunk_order(pipe.columns, config.chunks), feeding(config, pipe, 2)
    STEP = config.readers * mem.vector  # columns between a thread's vectors

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        pointer(mem.element),
        i64,
        i32,
        i64,
        i64,
        i64,
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
    )
    def softmax_ring_backward(dx, y, dy, M, N, dx_stride, y_stride, dy_stride, share):
        smem, sent = pipe.smem(), deal.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        block = deal.block(N, share)
        if tid == 0:
            pipe.init(smem)
            deal.init(sent)
        start_cluster()

        if warp == config.warps:
            if lane == 0:
                feed(smem, block, M, (y, dy), (y_stride, dy_stride))
        else:
            planned, row = order.plan(block.end - block.first), block.row
            i, row_round = i32(0), i32(0)  # copies and rows so far
            y_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            dy_frag = cuda.local.array(config.vectors * mem.vector, mem.number)
            while row < M:
                # dx = y * (dy - dot)  with  dot = sum(y * dy)
                dot = num.zero
                for k in range(planned.chunks):
                    stage = pipe.wait(smem, i + k)
                    left = block.end - (block.first + k * pipe.columns + tid * mem.vector)
                    index = pipe.begin(stage) + tid * mem.vector
                    chunk_dot = num.zero
                    for v in range(config.vectors):
                        if left > v * STEP:
                            mem.load_shared(y_frag, v * mem.vector, smem.tiles, index + v * STEP)
                            mem.load_shared(dy_frag, v * mem.vector, smem.tiles, index + v * STEP + pipe.tile)
                            for c in range(v * mem.vector, (v + 1) * mem.vector):
                                chunk_dot += y_frag[c] * dy_frag[c]
                    dot += chunk_dot
                    if k < planned.again:
                        pipe.release(smem, stage)
                deal.send_sum(sent, row_round, dot)
                dot = deal.sum(sent, row_round)

                for k in range(planned.chunks):
                    stage = pipe.wait(smem, i + planned.again + k)
                    at = block.first + order.second(planned, k) * pipe.columns + tid * mem.vector
                    index = pipe.begin(stage) + tid * mem.vector
                    for v in range(config.vectors):
                        if at + v * STEP < block.end:
                            mem.load_shared(y_frag, v * mem.vector, smem.tiles, index + v * STEP)
                            mem.load_shared(dy_frag, v * mem.vector, smem.tiles, index + v * STEP + pipe.tile)
                    pipe.release(smem, stage)
                    for c in range(len(y_frag)):
                        y_frag[c] *= dy_frag[c] - dot
                    for v in range(config.vectors):
                        column = at + v * STEP
                        mem.store_vector(dx, row * dx_stride + column, column < block.end, y_frag, v * mem.vector)
                i = i32(i + planned.chunks + planned.again)
                row += block.step
                row_round += 1

    return softmax_ring_backward
