"""matmul on Hopper's tensor cores: factors that can be loaded as boxes, of 16 bits, or float32 in a `precision`.

Products of a warpgroup (wgmma) read both factors from shared memory and run asynchronously, so threads have little to
do: one loads, the others start products and wait for them. The kernel is persistent: a block stays on its SM and
computes one tile [BLOCK_M, BLOCK_N] of the result after another.

    producer, one thread                                   consumers, a warpgroup for each 64 rows of the tile
    for each of the block's tiles:                         for each of the block's tiles:
        for each slice of BLOCK_K along the sum:               for each slice:
    1       acquire a stage                                3       wait for the stage
    2       load a [BLOCK_M, BLOCK_K] and                  4       acc [64, BLOCK_N] += a @ b
            b [BLOCK_K, BLOCK_N] into it                   5       release the previous slice's stage
                                                           6   y = act(acc + bias), which is copied out of shared
                                                               memory while the next tile begins

While consumers are at 6, the producer fills all stages with the next tile's slices. Blocks of a cluster compute
neighbouring tiles. Each loads a part of the slices that they share as a multicast to all of them, which saves reads
from L2. The order of tiles keeps shared slices in L2 (`schedule`). A result that can't be stored as boxes is stored row
by row. If a result has fewer tiles than the GPU has SMs, the sum of each is split (split.py).

The tensor cores add up a slice's products in float32. Results are bit-equal from run to run: an element is summed in
one order, whichever block computes it.

float32 is multiplied as tf32, in slices of 32 steps instead of 64, and must be contiguous along the sum: a factor that
is not, or can't be loaded as boxes, is copied first (`parts`). "tf32": products use the first 11 bits of mantissa and
would truncate the rest; the tensor map rounds to them during the load, at no cost. "3xtf32": every factor is first
copied as two parts of each number, and a slice is three products of parts. Sums are added up in pieces (`pieces`).

Shared memory: stages * ITEMSIZE * BLOCK_K * (BLOCK_M + BLOCK_N) bytes, and ITEMSIZE * BLOCK_M * STORE_N for results
that are being stored. Registers per thread: BLOCK_N / 2 for acc, twice as many with pieces, and about 60 others.
`setmaxnreg` moves registers from the producer's warpgroup to the consumers.
"""

from __future__ import annotations

from ...compiler.backend import Kernel, builds, cuda, f32, i32, kernel, u8, u32
from ...tile.boxes import Corner, prefetch_maps
from ...tile.roles import roles
from ...tile.schedule import schedule
from ...tile.warpgroup import ROWS, my_warpgroup
from .arguments import Sm90Variant, argument_types, other_coordinates
from .config import Sm90Config
from .output import box_results, row_results
from .slices import slices_of


@builds
def build_product(config: Sm90Config, found: Sm90Variant) -> Kernel:
    """Build matmul_sm90(a_map, b_map, to, extent)."""
    slices = slices_of(config, found)
    pipe, role = slices.pipe, roles(config.consumers)
    walk, axes = schedule(config.group, config.cluster), other_coordinates(found.others)
    output = (row_results if found.out else box_results)(config, found)

    @kernel(*argument_types(found), threads=role.threads, cluster=config.cluster.blocks)
    def matmul_sm90(a_map, b_map, to, extent):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        barriers = pipe.barriers()
        M, N = extent.M, extent.N
        m_blocks, n_blocks, count = slices.counts(extent)
        tiles = walk.numbers(extent.batches, m_blocks, n_blocks)
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            pipe.init(barriers)
        prefetch_maps((a_map, b_map), 1)
        output.begin(to, 3)
        pipe.start()
        tile, i = walk.first(), u32(0)
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while tile < tiles:
                    at = walk.position(tile, m_blocks, n_blocks)
                    m0, n0 = i32(at.m_block * config.block_m), i32(at.n_block * config.block_n)
                    for r in range(extent.rounds):
                        a_others = axes.factor(extent, extent.a_steps, at.batch, r)
                        b_others = axes.factor(extent, extent.b_steps, at.batch, r)
                        corners = (Corner(m0, i32(0), a_others), Corner(n0, i32(0), b_others))
                        i = slices.load(smem, barriers, (a_map, b_map), corners, i, count)
                    tile = u32(tile + walk.step())
        else:
            role.consume()
            acc = slices.fragment()  # [64, BLOCK_N]
            while tile < tiles:
                at = walk.position(tile, m_blocks, n_blocks)
                m0, n0 = i32(at.m_block * config.block_m) + ROWS * warpgroup, i32(at.n_block * config.block_n)
                output.start(floats, to, n0, N)
                i = slices.multiply(acc, smem, barriers, warpgroup, i, u32(count * extent.rounds))
                pipe.release(barriers, i)
                i = pipe.next(i)
                tile = u32(tile + walk.step())
                output.store(smem, floats, to, acc, Corner(m0, n0, axes.result(extent, at.batch)), M, N)
            output.finish()
        pipe.leave()

    return matmul_sm90
