"""matmul on Hopper's tensor cores for few tiles of long sums (split-K): each block of a cluster computes a part of a
sum.

    producer, one thread                       consumers, a warpgroup for each 64 rows of the tile
    loads this block's share of the slices     1   acc [64, BLOCK_N] = their sum
                                               2   acc to shared memory
    --- barrier of the cluster ---
                                               3   a share of the tile's rows: sum of all blocks' acc, by rank
                                               4   y = act(sum + bias), row by row
    --- barrier of the cluster: no block reads another's memory any more ---

One launch, and no memory in addition to the results: the parts go from SM to SM, through distributed shared memory.
Results are bit-equal from run to run. A split sum is rounded differently from a whole one, so a row's last bits depend
on the number of rows.

Shared memory: stages * ITEMSIZE * BLOCK_K * (BLOCK_M + BLOCK_N) bytes, and 4 * BLOCK_M * BLOCK_N for the sums.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import Kernel, Members, builds, cuda, f32, i32, i64, kept_noun, kernel, u8, u32, verb
from ...ptx.arithmetic import opaque_i32
from ...ptx.memory import ld_shared_cluster_v4_f32, st_shared_v2_f32
from ...ptx.warp import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from ...tile.boxes import Corner, prefetch_maps
from ...tile.epilogue import NEAR, place_of
from ...tile.roles import roles
from ...tile.schedule import schedule
from ...tile.warpgroup import ROWS, my_warpgroup
from ..tiled import finishing
from .arguments import Sm90Variant, argument_types, other_coordinates, results_of
from .config import Sm90Config
from .slices import slices_of


@builds
def build_split_product(config: Sm90Config, found: Sm90Variant) -> Kernel:
    """Build matmul_sm90_split(a_map, b_map, to, extent). An element is one product of matrices: extent.rounds is 1."""
    slices = slices_of(config, found)
    pipe, role = slices.pipe, roles(config.consumers)
    walk, axes = schedule(config.group, config.cluster), other_coordinates(found.others)
    rest = finishing(found.product, NEAR, found.out, short=found.short)
    sums = cluster_sums(config.block_n, config.output_at, config.splits, rest.finish)

    @kernel(*argument_types(found), threads=role.threads, cluster=config.splits)
    def matmul_sm90_split(a_map, b_map, to, extent):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        barriers = pipe.barriers()
        m_blocks, n_blocks, count = slices.counts(extent)
        tile, rank = u32(cuda.blockIdx.x) // u32(config.splits), u32(cuda.blockIdx.x) % u32(config.splits)
        begin, end = u32(count * rank) // u32(config.splits), u32(count * (rank + 1)) // u32(config.splits)
        at = walk.position(tile, m_blocks, n_blocks)
        m0, n0 = i32(at.m_block * config.block_m), i32(at.n_block * config.block_n)
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            pipe.init(barriers)
        prefetch_maps((a_map, b_map), 1)
        pipe.start()
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                k0 = i32(begin * config.block_k)
                a_others = axes.factor(extent, extent.a_steps, at.batch, 0)
                b_others = axes.factor(extent, extent.b_steps, at.batch, 0)
                corners = (Corner(m0, k0, a_others), Corner(n0, k0, b_others))
                slices.load(smem, barriers, (a_map, b_map), corners, u32(0), u32(end - begin))
            sums.meet()
        else:
            role.consume()
            acc = slices.fragment()  # [64, BLOCK_N]
            slices.multiply(acc, smem, barriers, warpgroup, u32(0), u32(end - begin))
            sums.put(floats, acc)
            sums.meet()
            corner = Corner(m0 + ROWS * warpgroup, n0, axes.result(extent, at.batch))
            sums.finish(floats, corner, extent.M, results_of(to, corner, extent.N))
        sums.meet()

    return matmul_sm90_split


@kept_noun
def cluster_sums(columns: int, at: int, blocks: int, finish: Callable[..., None]) -> Members:
    """The verbs for tiles of `columns` columns in `blocks` blocks.

        sums.put(floats, acc)                        [64, columns] of every warpgroup, to shared memory
        sums.meet()
        sums.finish(floats, corner, M, results)      for some of the rows: add all blocks' parts, by rank
        sums.meet()                                  after it, no block reads another's memory

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
