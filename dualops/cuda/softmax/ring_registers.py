"""softmax of long rows on sm_90: read once, while the next rows are already on their way.

A cluster of blocks takes one row after another, each block a share of its columns, cut into chunks. A warp of its own
copies chunks into a ring of stages (cp.async.bulk), as far ahead as there is room; the other warps consume:

    1  for each chunk: to registers, the stage is free again; maximum, e = exp(x - maximum), the sum of e
    2  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    3  for each chunk: y = e * exp(chunk maximum - row maximum) / row sum

A block that waits in step 2 reads and writes nothing, so that an SM wants two of them, whose rows take turns.
Rows that registers do not hold, and the gradient: ring_stages.py.
Milakov & Gimelshein 2018, arXiv:1805.02867, section 3.1.
Shared memory: stages * chunk * itemsize, and about 4 KiB. Registers: a thread's share of a row, and about 50.
"""

from __future__ import annotations

from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..tile.numbers import numbers
from ..tile.ring import ring, start_cluster
from ..tile.storage import storage
from .ring_config import RingConfig, rows


@builds
def build_forward(config: RingConfig, dtype: str) -> Kernel:
    """softmax_ring(y, x, M, N, y_stride, x_stride, share): M rows of N columns, strides between rows in elements.

    share: columns of a block.
    """
    mem = storage(dtype)
    num, deal = numbers(mem.number), rows(config, dtype)
    pipe = ring(config.staged(dtype, 1), config.warps)
    ELEMENTS = config.vectors * mem.vector  # of a chunk that a thread has

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
    def softmax_ring(y, x, M, N, y_stride, x_stride, share):
        smem, sent = pipe.smem(), deal.smem()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        first, end, row, step = deal.block(N, share)
        if tid == 0:
            pipe.init(smem)
            deal.init(sent)
        start_cluster()

        i = i32(0)  # copies so far
        if warp == config.warps:
            if lane == 0:
                while row < M:
                    for at in range(first, end, pipe.columns):
                        filling = pipe.acquire(smem, i, 1, min(pipe.columns, end - at))
                        pipe.copy(filling, 0, 0, x, row * x_stride + at)
                        i += 1
                    row += step
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

                deal.send(sent, row_round, my_max, my_sum)
                base, inverse = deal.merge(sent, row_round)
                for k in range(config.chunks):
                    rescale = num.exp(chunk_max[k] - base) * inverse
                    for c in range(ELEMENTS):
                        frag[k * ELEMENTS + c] *= rescale
                    for v in range(config.vectors):
                        column = first + k * pipe.columns + (v * config.readers + tid) * mem.vector
                        mem.store_vector(y, row * y_stride + column, column < end, frag, k * ELEMENTS + v * mem.vector)
                row += step
                row_round += 1

    return softmax_ring
