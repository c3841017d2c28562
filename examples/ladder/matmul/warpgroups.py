"""matmul's ladder on Hopper: a warpgroup multiplies out of shared memory, which one thread fills with boxes.

Two kernels: in the first the threads that multiply also load, in the second other threads load.
"""

from __future__ import annotations

from dualops.cuda.compiler.backend import (
    Kernel,
    Members,
    builds,
    cuda,
    f32,
    i32,
    i64,
    kernel,
    noun,
    tensor_map,
    u8,
    u32,
    verb,
)
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm90.arguments import Sm90Variant
from dualops.cuda.matmul.sm90.config import Sm90Config
from dualops.cuda.matmul.sm90.slices import slices_of, tiles_of
from dualops.cuda.matmul.tiled import block_order
from dualops.cuda.tile.boxes import Corner, box_tile, prefetch_maps
from dualops.cuda.tile.epilogue import box_output
from dualops.cuda.tile.roles import roles
from dualops.cuda.tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma

from .tiles import DTYPE

# a is read by rows, [M, K], b too, [K, N]
FACTORS = Sm90Variant(Variant(DTYPE), "k", "mn", others=1, out=0)


@noun
def block_tile(config: Sm90Config) -> Members:
    """Return the verbs for a block's tile of the result, in both kernels."""
    of_block, NOWHERE = block_order(config.block_m, config.block_n), (i32(0),)
    boxes = box_output(DTYPE, config.block_n, config.output_at, config.places, 1)

    @verb
    def begin(M, N):
        """Return the tile's first row and column."""
        _, m0, n0 = of_block(M, N)
        return i32(m0), i32(n0)

    @verb
    def corners(m0, n0, i):
        """Return where slice i of a and of b begins."""
        k0 = i32(i * config.block_k)
        return Corner(m0, k0, NOWHERE), Corner(n0, k0, NOWHERE)

    @verb
    def count(K):
        """Return the number of slices."""
        return u32((K + (config.block_k - 1)) // config.block_k)

    @verb
    def store(smem, y_map, acc, m0, n0):
        """Store a warpgroup's sums as boxes, through shared memory."""
        values = boxes.fragment()
        part = i32(0)
        while part < boxes.parts:
            boxes.acquire()
            boxes.take(values, acc, part)
            boxes.store(smem, y_map, values, Corner(m0, n0, NOWHERE), part, part)
            part = boxes.next(part)
        boxes.finish()

    return locals()


@builds
def build_boxes(config: Sm90Config) -> Kernel:
    """Build matmul_boxes(a_map, b_map, y_map, M, N, K): a warpgroup computes 64 rows of its block's tile.

    1  for each slice t:
    2      thread 0: start to load slices up to t + STAGES - 1, once all warps have read slice t - 1
    3      wait until slice t has arrived
    4      acc [64, BLOCK_N] += a [64, BLOCK_K] @ b [BLOCK_K, BLOCK_N], out of shared memory; wait for that
    5  y = acc, through shared memory, as boxes
    """
    tile, slices = block_tile(config), slices_of(config, FACTORS)
    a, b = tiles_of(config, FACTORS.a, FACTORS.b)
    a_tile, b_tile = box_tile(a, 0, 1), box_tile(b, config.stages * a.nbytes, 1)
    pipe, mma = slices.pipe, warpgroup_mma(DTYPE, a, b)

    @kernel(*[tensor_map] * 3, *[i64] * 3, threads=128 * config.consumers)
    def matmul_boxes(a_map, b_map, y_map, M, N, K):
        smem = cuda.shared.array(0, u8, alignment=1024)
        barriers = pipe.barriers()
        m0, n0 = tile.begin(M, N)
        count, warpgroup, first = tile.count(K), my_warpgroup(), cuda.threadIdx.x == 0
        if first:
            pipe.init(barriers)
        prefetch_maps((a_map, b_map, y_map), 0)
        pipe.start()
        acc = mma.fragment()  # [64, BLOCK_N]
        for e in range(mma.size):
            acc[e] = f32(0)
        t, filled = u32(0), u32(0)
        while t != count:
            if first:
                coming = u32(min(count, u32(t + config.stages)) - filled)
                filled = slices.load(smem, barriers, (a_map, b_map), tile.corners(m0, n0, filled), filled, coming)
            stage = pipe.wait(barriers, t)
            mma.add(acc, smem, a_tile.at(stage), b_tile.at(stage), warpgroup)
            mma.wait(acc)
            pipe.release(barriers, t)
            t = pipe.next(t)
        tile.store(smem, y_map, acc, i32(m0 + ROWS * warpgroup), n0)

    return matmul_boxes


@builds
def build_roles(config: Sm90Config) -> Kernel:
    """Build matmul_roles(a_map, b_map, y_map, M, N, K): the same, with an additional warpgroup that loads.

        producer, one thread                        consumers, a warpgroup for each 64 rows
        for each slice t:                           for each slice t:
    1       wait for a free stage,              2       wait until slice t has arrived
            start to load slice t               3       start acc [64, BLOCK_N] += a @ b
                                                4       wait for the previous product, release its stage
                                                5   y = acc, through shared memory, as boxes
    """
    tile, slices, role = block_tile(config), slices_of(config, FACTORS), roles(config.consumers)
    pipe = slices.pipe

    @kernel(*[tensor_map] * 3, *[i64] * 3, threads=role.threads)
    def matmul_roles(a_map, b_map, y_map, M, N, K):
        smem = cuda.shared.array(0, u8, alignment=1024)
        barriers = pipe.barriers()
        m0, n0 = tile.begin(M, N)
        count, warpgroup, none = tile.count(K), my_warpgroup(), u32(0)
        if cuda.threadIdx.x == 0:
            pipe.init(barriers)
        prefetch_maps((a_map, b_map, y_map), 1)
        pipe.start()
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                slices.load(smem, barriers, (a_map, b_map), tile.corners(m0, n0, none), none, count)
        else:
            role.consume()
            acc = slices.fragment()  # [64, BLOCK_N]
            slices.multiply(acc, smem, barriers, warpgroup, none, count)
            tile.store(smem, y_map, acc, i32(m0 + ROWS * warpgroup), n0)

    return matmul_roles
