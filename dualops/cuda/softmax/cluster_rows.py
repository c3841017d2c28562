"""softmax of rows of 32 KiB to 1 MiB on sm_90, and its gradient to 512 KiB: they wait in the registers of a cluster.

    1  a thread loads its part of x[row], `vectors` times 16 bytes, which stay in registers as they came
    2  of every vector: the running maximum, and the sum of exp(x - maximum)
    3  warps send (maximum, sum) to every block of the cluster, and merge all of them    (st.async, one mbarrier)
    4  of every vector again: y = exp(x - row maximum) / row sum

The gradient has two rows wait, of y and of dy; what warps send is their sum of y * dy, and dx = y * (dy - row sum).

While a row's blocks load, or wait for one another, those of other rows on the same SM compute and write: the hardware
starts a cluster wherever there is room for one, so that all SMs are busy to the end. Numbers of 16 bits are unpacked
twice, and exponentials computed twice: numbers would take twice the registers, and half of the blocks their room.
Results are stored as anything else is, not as the first to leave L2, which is 1 to 2 % faster. Milakov & Gimelshein
2018, arXiv:1805.02867, section 3.1. Registers: 4 a vector of each row, and about 30.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, builds, cuda, i32, i64, kernel, pointer
from ..launch.arrays import align_up, cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..tile.numbers import numbers
from ..tile.packed import packed
from ..tile.ring import start_mbarriers
from ..tile.storage import storage
from .arguments import Call
from .ring_config import RingConfig, rows


@dataclass(frozen=True)
class ClusterRowsConfig:
    """How a row is dealt to `cluster` blocks."""

    threads: int
    vectors: int  # of 16 bytes that a thread has
    cluster: int
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM

    @cached_property
    def merging(self) -> RingConfig:
        """How its warps merge their parts: as those of a ring do, of one row."""
        return RingConfig(self.threads // 32, self.vectors, 1, self.cluster, 1)

    def columns(self, dtype: str) -> int:
        """Most columns of a block."""
        return self.threads * self.vectors * storage(dtype).vector


THREADS = 256  # of a block
# Vectors a thread, at most, and blocks that an SM has registers for. Shares of the roof of 2^29 elements of 2 bytes or
# 2^28 of 4, H200, 2026-11-26; in brackets what such rows took before: 48 KiB 0.97 (a block of 1024 threads 0.78), 64
# KiB 0.96 to 0.97 (0.89), 80: 0.97 (a ring 0.78), 128: 0.97 (a ring 0.90), 256: 0.98 and 512: 0.97 (rows in the shared
# memory of six blocks an SM 0.89, 0.87), 1 MiB 0.91, of 4-byte numbers 0.95 (in stages 0.77, 0.88); 251 KiB 0.98, 297:
# 0.95. Less good: numbers in registers, exponentials once: 0.80 at 128 KiB; 512 threads: 0.91 at 512 KiB, 0.77 at 1
# MiB; 16 blocks of 5 vectors 0.80 at 297 KiB, 4 of these 0.94 at 80; 2 MiB by 512 threads with 16 vectors 0.69. As
# good, but not as simple: bulk copies to shared memory, 0.97 at 128 KiB.
BLOCKS = {8: 4, 12: 3, 16: 2}
# Of y, and as many of dy. Times of 2^29 elements of 2 bytes, one H100 80 GB, 2026-11-27, in brackets those of a ring;
# the roof is 1051 us. 64 KiB 1051 us (1241), 80: 1053 (1264), 128: 1050 (1107), 256: 1051 (1132), 512: 1053 (1112). Of
# four vectors four blocks an SM 1056 to 1057; clusters half as large, with eight vectors, 1057 to 1060
BACKWARD_BLOCKS = {4: 3, 6: 3, 8: 2}


@builds
def build_forward(config: ClusterRowsConfig, dtype: str) -> Kernel:
    """softmax_cluster_rows(y, x, N, y_stride, x_stride, share): a row of N columns a cluster, strides in elements.

    share: columns of a block.
    """
    mem, regs = storage(dtype), packed(dtype)
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
        sent = deal.smem()
        held = cuda.local.array(config.vectors * regs.size, regs.element)  # my part of x[row]
        frag = cuda.local.array(mem.vector, mem.number)
        block, tid = deal.block(N, share), cuda.threadIdx.x
        column = i32(tid * mem.vector)
        left = i32(block.end - block.first - column)  # columns from my first one on
        x_row = block.row * x_stride + (block.first + column)
        y_row = block.row * y_stride + (block.first + column)
        for v in range(config.vectors):
            regs.load(held, v, x, x_row + v * STEP, left > v * STEP, num.minus_inf)
        if tid == 0:
            deal.init(sent)
        start_mbarriers()

        my_max, my_sum = num.minus_inf, num.zero
        for v in range(config.vectors):
            regs.unpack(frag, 0, held, v)
            new_max = my_max
            for c in range(mem.vector):
                new_max = num.maximum(new_max, frag[c])
            base = num.base(new_max)
            few = num.zero  # a vector's own sum, so that no chain of additions is long
            for c in range(mem.vector):
                few += num.exp(frag[c] - base)
            my_sum = my_sum * num.exp(my_max - base) + few
            my_max = new_max

        deal.send(sent, i32(0), my_max, my_sum)
        base, inverse = deal.merge(sent, i32(0))
        regs.anew(held)
        for v in range(config.vectors):
            regs.unpack(frag, 0, held, v)
            for c in range(mem.vector):
                frag[c] = num.exp(frag[c] - base) * inverse
            mem.store_kept(y, y_row + v * STEP, left > v * STEP, frag, 0)

    return softmax_cluster_rows


@builds
def build_backward(config: ClusterRowsConfig, dtype: str) -> Kernel:
    """softmax_cluster_rows_backward(dx, y, dy, N, dx_stride, y_stride, dy_stride, share): as `build_forward`."""
    mem, regs = storage(dtype), packed(dtype)
    num, deal = numbers(mem.number), rows(config.merging, dtype)
    STEP = config.threads * mem.vector

    @kernel(
        *[pointer(mem.element)] * 3,
        i32,
        *[i64] * 3,
        i32,
        threads=config.threads,
        min_blocks=config.min_blocks,
        cluster=config.cluster,
    )
    def softmax_cluster_rows_backward(dx, y, dy, N, dx_stride, y_stride, dy_stride, share):
        sent = deal.smem()
        held = cuda.local.array(config.vectors * regs.size, regs.element)  # my part of y[row]
        held_dy = cuda.local.array(config.vectors * regs.size, regs.element)
        frag, dy_frag = cuda.local.array(mem.vector, mem.number), cuda.local.array(mem.vector, mem.number)
        block, tid = deal.block(N, share), cuda.threadIdx.x
        column = i32(tid * mem.vector)
        left = i32(block.end - block.first - column)
        y_row = block.row * y_stride + (block.first + column)
        dy_row = block.row * dy_stride + (block.first + column)
        dx_row = block.row * dx_stride + (block.first + column)
        for v in range(config.vectors):
            regs.load(held, v, y, y_row + v * STEP, left > v * STEP, num.zero)
            regs.load(held_dy, v, dy, dy_row + v * STEP, left > v * STEP, num.zero)
        if tid == 0:
            deal.init(sent)
        start_mbarriers()

        dot = num.zero
        for v in range(config.vectors):
            regs.unpack(frag, 0, held, v)
            regs.unpack(dy_frag, 0, held_dy, v)
            few = num.zero
            for c in range(mem.vector):
                few += frag[c] * dy_frag[c]
            dot += few

        deal.send_sum(sent, i32(0), dot)
        dot = deal.sum(sent, i32(0))
        regs.anew(held)
        regs.anew(held_dy)
        for v in range(config.vectors):
            regs.unpack(frag, 0, held, v)
            regs.unpack(dy_frag, 0, held_dy, v)
            for c in range(mem.vector):
                frag[c] *= dy_frag[c] - dot
            mem.store_kept(dx, dx_row + v * STEP, left > v * STEP, frag, 0)

    return softmax_cluster_rows_backward


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The smallest cluster that holds a row."""
    return _choices(Call(problem, results), BLOCKS, build_forward, device)


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The smallest that holds two."""
    return _choices(Call(problem, results), BACKWARD_BLOCKS, build_backward, device)


def _choices(call: Call, blocks: Mapping[int, int], build: Callable[..., Kernel], device: Device) -> Iterator[Choice]:
    if not (call.contiguous and call.aligned and device.has_bulk_copies):
        return
    config = cluster_config(call.N, call.dtype, device, blocks)
    if config is not None:
        steps = partial(steps_of, call, config, build)
        yield Choice("sm90", config, "a row waits in the registers of a cluster", steps)


def cluster_config(N: int, dtype: str, device: Device, blocks: Mapping[int, int] = BLOCKS) -> ClusterRowsConfig | None:
    """The smallest cluster that holds a row of N elements; None where none does, and where a block holds it.

    blocks: as BLOCKS. Rows of the fewest vectors in it need no cluster; of more than the second most, the largest one.
    """
    step, (least, few, most) = THREADS * storage(dtype).vector, blocks
    if step * least >= N:
        return None
    clusters = [cluster for cluster in (2, 4, 8, 16) if cluster <= device.max_cluster]
    cluster = next((cluster for cluster in clusters if cluster * few * step >= N), clusters[-1])
    for vectors in range(1, (most if dtype != "float64" else few) + 1):
        if cluster * vectors * step >= N:
            resident = next(blocks[many] for many in blocks if vectors <= many)
            return ClusterRowsConfig(THREADS, vectors, cluster, resident - (dtype == "float64"))
    return None


def steps_of(call: Call, config: ClusterRowsConfig, build: Callable[..., Kernel]) -> list[Step]:
    """The launch of `build`'s kernel."""
    share = align_up(cdiv(call.N, config.cluster), 8 * storage(call.dtype).vector)  # whole lines of 128 bytes
    args = (*call.metas, call.N, *call.row_strides, share)
    return [Step(build(config, call.dtype), (call.M * config.cluster,), args)]
