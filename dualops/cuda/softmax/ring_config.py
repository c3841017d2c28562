"""What the kernels of ring_stages.py share: how rows are dealt to blocks, and how parts merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...spec.meta import compute_dtype, itemsize
from ..compiler.backend import Namespace, cuda, i64, verb
from ..launch.arrays import align_up, cdiv
from ..tile.numbers import numbers
from ..tile.ring import Stages, cluster_ctarank, parts
from ..tile.rows import lane_reductions
from ..tile.storage import storage


@dataclass(frozen=True)
class RingConfig:
    """`warps` consume, one more copies. A stage holds `vectors` 16-byte vectors a thread of each array."""

    warps: int
    vectors: int
    stages: int
    cluster: int
    chunks: int  # of a block's share of a row that stay in their stages
    min_blocks: int = 1  # blocks that registers and shared memory must leave room for on an SM

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

    def kept(self, dtype: str) -> int:
        """Columns of a row that a cluster keeps."""
        return self.cluster * self.chunks * self.chunk(dtype)

    def share(self, N: Any, dtype: str) -> Any:
        """Columns of a block, of rows of N."""
        return align_up(cdiv(N, self.cluster), 8 * storage(dtype).vector)  # whole lines of 128 bytes

    def staged(self, dtype: str, arrays: int) -> Stages:
        """What the ring keeps: a chunk of every array in each stage."""
        return Stages(dtype, self.stages, arrays, 1, self.chunk(dtype))

    def static_bytes(self, dtype: str) -> int:
        """Return the most bytes of shared memory besides the stages: parts and mbarriers."""
        return 4 * self.warps * self.cluster * itemsize(compute_dtype(dtype)) + 16 * MOST_STAGES + 256


MOST_STAGES = 32


class Block(NamedTuple):
    """What a block has: columns first to end of the rows `row`, `row + step`, ..."""

    first: int
    end: int
    row: int
    step: int


class Rows(Namespace):
    """How rows are dealt to clusters and blocks, and parts of a row are merged by the warps that consume it."""

    block: Callable[..., Block]  # (N, share): that of this block
    smem: Callable[..., Any]  # (): the shared arrays of parts; once in a kernel, by all threads
    init: Callable[..., None]  # (sent): by one thread, before `start_cluster`
    send: Callable[..., None]  # (sent, row_round, my_max, my_sum): my warp's maximum and sum, to all warps of the row
    merge: Callable[..., Any]  # (sent, row_round) -> what exponents of the row are taken against, 1 / their sum
    send_sum: Callable[..., None]  # (sent, row_round, x)
    sum: Callable[..., Any]  # (sent, row_round): of x, over all threads of the row


def rows(config: RingConfig, dtype: str) -> Rows:
    """The verbs."""
    number = storage(dtype).number
    num, lanes = numbers(number), lane_reductions(number, 32)
    warpgroup_barrier = parts(number, num.send_pair, config.warps, config.cluster)

    @verb
    def block(N, share):
        first = min(N, cluster_ctarank() * share)
        row, clusters = i64(cuda.blockIdx.x // config.cluster), cuda.gridDim.x // config.cluster
        return Block(first, min(N, first + share), row, clusters)

    @verb
    def send(sent, row_round, my_max, my_sum):
        warp_max = lanes.max(my_max)
        warp_sum = lanes.sum(my_sum * num.exp(my_max - num.base(warp_max)))
        warpgroup_barrier.send(sent, row_round, warp_max, warp_sum)

    @verb
    def merge(sent, row_round):
        begin = warpgroup_barrier.wait(sent, row_round)
        lane = cuda.threadIdx.x % 32
        row_max = num.minus_inf
        for part in range(lane, warpgroup_barrier.size, 32):
            row_max = num.maximum(row_max, sent.pairs[begin + 2 * part])
        base = num.base(lanes.max(row_max))
        row_sum = num.zero
        for part in range(lane, warpgroup_barrier.size, 32):
            row_sum += sent.pairs[begin + 2 * part + 1] * num.exp(sent.pairs[begin + 2 * part] - base)
        return base, num.one / lanes.sum(row_sum)

    @verb
    def send_sum(sent, row_round, x):
        warpgroup_barrier.send(sent, row_round, lanes.sum(x), num.zero)

    @verb
    def sum_of_row(sent, row_round):
        begin = warpgroup_barrier.wait(sent, row_round)
        total = num.zero
        for part in range(cuda.threadIdx.x % 32, warpgroup_barrier.size, 32):
            total += sent.pairs[begin + 2 * part]
        return lanes.sum(total)

    return Rows.from_locals(locals(), smem=warpgroup_barrier.smem, init=warpgroup_barrier.init, sum=sum_of_row)
