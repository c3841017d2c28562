"""softmax of rows of 128 KiB to 512 KiB on sm_90: a cluster of blocks a row, six rows' blocks on an SM.

    1  a thread starts to copy its part of x[row] to shared memory, `vectors` times 16 bytes           (cp.async)
    2  of every chunk of `chunk` vectors: the running maximum, and the sum of exp(x - maximum)
    3  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    4  of every chunk again: y = exp(x - row maximum) / row sum

Nobody reads what another thread has copied. While a row's blocks wait for one another, those of other rows read and
write: rings of two rows (ring.py) have but one warp in three of these, and run into the time of their exponentials.
Results are stored as anything else is, not as the first to leave L2, which is 1 to 2 % faster. Milakov & Gimelshein
2018, arXiv:1805.02867, section 3.1. Shared memory: threads * vectors * 16 bytes. Registers: 40.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from ...spec import ArrayMeta, Problem
from ...spec.meta import itemsize
from ..arrays import align_up, cdiv
from ..backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..device import Device
from ..plans import Choice
from ..step import Step
from ..tile.async_copies import copies, cp_async_commit, cp_async_wait_group
from ..tile.numbers import numbers
from ..tile.ring import start_cluster
from ..tile.storage import storage
from .arguments import Call
from .ring_config import RingConfig, rows


@dataclass(frozen=True)
class ClusterRowsConfig:
    """How a row is dealt to `cluster` blocks."""

    threads: int
    vectors: int  # of 16 bytes that a thread has
    chunk: int  # of these, in registers at once
    cluster: int
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM

    @cached_property
    def merging(self) -> RingConfig:
        """How its warps merge their parts: as those of a ring do, of one row."""
        return RingConfig(self.threads // 32, self.vectors, 1, self.cluster, 1)

    def columns(self, dtype: str) -> int:
        """Most columns of a block."""
        return self.threads * self.vectors * storage(dtype).vector


# Shares of the roof of 2^29 elements of 2 bytes or 2^28 of 4, H200, 2026-11-26; of rings: 256 KiB 0.69, of 4-byte
# numbers 0.88, 512 KiB 0.79. Rows to 128 KiB: 0.90 (ring_registers.py 0.92).
FORWARD = (
    ClusterRowsConfig(256, 8, 2, 8, min_blocks=6),  # 256 KiB: 0.90, of 4-byte numbers 0.905; 128 threads 0.905, 0.904
    ClusterRowsConfig(256, 8, 2, 16, min_blocks=6),  # 512 KiB: 0.875; 8 blocks of twice the columns 0.86
)
SHORTER = 128 << 10  # bytes of rows that ring_registers.py is for


@builds
def build_forward(config: ClusterRowsConfig, dtype: str) -> Kernel:
    """softmax_cluster_rows(y, x, N, y_stride, x_stride, share): a row of N columns a cluster, strides in elements.

    share: columns of a block.
    """
    mem, copy = storage(dtype), copies(storage(dtype).vector, itemsize(dtype))
    num, deal = numbers(mem.number), rows(config.merging, dtype)
    STEP = config.threads * mem.vector  # columns between a thread's vectors

    @kernel(
        pointer(mem.element),
        pointer(mem.element),
        i32,
        i64,
        i64,
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
    )
    def softmax_cluster_rows(y, x, N, y_stride, x_stride, share):
        sent, x_smem = deal.smem(), cuda.shared.array(0, mem.element, alignment=16)
        words = cuda.local.array(1, i32)  # for copies of single elements, of which there are none
        block, tid = deal.block(N, share), cuda.threadIdx.x
        column = i32(tid * mem.vector)
        left = i32(block.end - block.first - column)  # columns from my first one on
        x_row = block.row * x_stride + (block.first + column)
        y_row = block.row * y_stride + (block.first + column)
        for v in range(config.vectors):
            if left > v * STEP:
                copy.start(words, 0, x_smem, column + v * STEP, x, x_row + v * STEP, 1, copy.there(mem.vector))
        cp_async_commit()
        if tid == 0:
            deal.init(sent)
        start_cluster()
        cp_async_wait_group(0)

        frag = cuda.local.array(config.chunk * mem.vector, mem.number)
        my_max, my_sum = num.minus_inf, num.zero
        for k in range(0, config.vectors, config.chunk):
            for c in range(len(frag)):
                frag[c] = num.minus_inf
            for v in range(config.chunk):
                if left > (k + v) * STEP:
                    mem.load_shared(frag, v * mem.vector, x_smem, column + (k + v) * STEP)
            new_max = my_max
            for c in range(len(frag)):
                new_max = num.maximum(new_max, frag[c])
            base = num.base(new_max)
            chunk_sum = num.zero  # added as one, so that a long row's sum keeps its last bits
            for c in range(len(frag)):
                chunk_sum += num.exp(frag[c] - base)
            my_sum = my_sum * num.exp(my_max - base) + chunk_sum
            my_max = new_max

        deal.send(sent, i32(0), my_max, my_sum)
        base, inverse = deal.merge(sent, i32(0))
        for k in range(0, config.vectors, config.chunk):
            for v in range(config.chunk):
                if left > (k + v) * STEP:
                    mem.load_shared(frag, v * mem.vector, x_smem, column + (k + v) * STEP)
            for c in range(len(frag)):
                frag[c] = num.exp(frag[c] - base) * inverse
            for v in range(config.chunk):
                mem.store_kept(y, y_row + (k + v) * STEP, left > (k + v) * STEP, frag, v * mem.vector)

    return softmax_cluster_rows


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The smallest cluster that holds a row of 16- or 32-bit numbers."""
    call = Call(problem, results)
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    config = cluster_config(call.N, call.dtype, device)
    if config is not None:
        yield Choice("sm90", config, "a cluster keeps a row, and six share an SM", partial(_steps, call, config))


def cluster_config(N: int, dtype: str, device: Device) -> ClusterRowsConfig | None:
    """The first that holds a row of N elements; None of shorter rows, of doubles and where there is none."""
    if device.name == "simulator" or itemsize(dtype) > 4 or N * itemsize(dtype) <= SHORTER:
        return None
    fitting = (config for config in FORWARD if config.cluster <= device.max_cluster)
    return next((config for config in fitting if config.cluster * config.columns(dtype) >= N), None)


def _steps(call: Call, config: ClusterRowsConfig) -> list[Step]:
    share = align_up(cdiv(call.N, config.cluster), 8 * storage(call.dtype).vector)  # whole lines of 128 bytes
    args = (*call.metas, call.N, *call.row_strides, share)
    shared_bytes = config.columns(call.dtype) * itemsize(call.dtype)
    return [Step(build_forward(config, call.dtype), (call.M * config.cluster,), args, shared_bytes)]
