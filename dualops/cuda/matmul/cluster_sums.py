"""Split-K sums in a cluster: each block has a part of every sum, and adds up some rows of all parts in a fixed order.

sums.put(floats, acc)                        [64, columns] of every warpgroup, to shared memory
barrier of the cluster
sums.finish(floats, corner, M, results)      for some of the rows: add all blocks' parts, by rank
barrier of the cluster                       after it, no block reads another's memory
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, cuda, f32, i32, i64, kept_noun, verb
from ..ptx.arithmetic import opaque_i32
from ..ptx.memory import ld_shared_cluster_v4_f32, st_shared_v2_f32
from ..ptx.warp import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from ..tile.epilogue import NEAR, place_of
from ..tile.warpgroup import ROWS, my_warpgroup


@kept_noun
def cluster_sums(columns: int, at: int, blocks: int, finish: Callable[..., None]) -> Members:
    """The verbs for tiles of `columns` columns in `blocks` blocks.

    at: first byte of their shared memory, which has 256 * columns bytes for each warpgroup.
    finish(values, results, m, n) is called with NEAR sums of row m, from column n on, for rows below M. It must
    skip columns outside of the result.

    All threads of the warpgroups that have parts call the verbs; every thread of the cluster calls `meet`.
    """
    place, pairs, groups = place_of(columns), columns // 8, columns // NEAR
    first, size, items = at // 4, ROWS * columns, ROWS * columns // NEAR

    @verb
    def put(floats, acc):
        """Write acc to shared memory. floats: all of it, as an array of f32."""
        tid = cuda.threadIdx.x % 128
        mine = i32(first + my_warpgroup() * size)
        row, column = i32(tid // 32 * 16 + tid % 32 // 4), i32(2 * (tid % 4))
        for j in range(pairs):
            for half in range(2):
                to, e = place(row + 8 * half, column + 8 * j), 4 * j + 2 * half
                st_shared_v2_f32(floats, i32(mine + to), acc[e], acc[e + 1])

    @verb
    def meet():
        """Wait for the cluster. Earlier writes are visible afterwards, and memory that was read may be overwritten."""
        barrier_cluster_arrive()
        barrier_cluster_wait()

    @verb
    def finish_(floats, corner, M, results):
        values = cuda.local.array(NEAR, f32)
        mine = i32(first + my_warpgroup() * size)
        item = i32(cluster_ctarank() * 128 + cuda.threadIdx.x % 128)
        while item < items:
            m, n = i32(item // groups), i32(item % groups * NEAR)
            for c in range(NEAR):
                values[c] = f32(0)
            for rank in range(blocks):
                for c in range(0, NEAR, 4):
                    four = ld_shared_cluster_v4_f32(floats, i32(mine + place(m, n + c)), rank)
                    for e in range(4):
                        values[c + e] += four[e]
            if corner.row + m < M:
                finish(values, results, i64(corner.row + m), i64(corner.depth + n))
            item = opaque_i32(item + 128 * blocks)

    return locals()
