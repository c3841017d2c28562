"""How matmul's sm90 kernels compute a tile's sum: one thread loads slices along it, warpgroups multiply them.

A stage of the pipeline has a slice of a, [BLOCK_M, BLOCK_K], and one of b, [BLOCK_K, BLOCK_N].

Tensor cores round additions to their accumulators toward zero, so the error of a sum grows with its length. CUDA cores
round additions to nearest, so their error grows with the square root of the length. So tensor cores add up only a few
slices (a piece), and threads add the piece to a float32 sum (`in_pieces`). DeepSeek-V3, arXiv:2412.19437, section
3.3.2, does so for fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Members, f32, i32, members, noun, u32, verb
from ...tile.boxes import Corner, box_tile
from ...tile.pipeline import Pipeline, pipeline
from ...tile.swizzle import Operand
from ...tile.warpgroup import WarpgroupMma, warpgroup_mma
from .arguments import Sm90Variant
from .boxed import tile_of
from .config import Sm90Config


def tiles_of(config: Sm90Config, a_major: str, b_major: str) -> tuple[Operand, Operand]:
    """Return a stage's tiles of a and b."""
    depth, nbytes = config.block_k, config.itemsize
    return tile_of(a_major, config.block_m, depth, nbytes), tile_of(b_major, config.block_n, depth, nbytes)


def in_pieces(piece: int, pipe: Pipeline, mma: WarpgroupMma, multiply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb like `multiply` of `slices_of`, which calls `multiply` for each piece of `piece` slices."""
    ZERO, PIECE = f32(0), u32(piece)

    @verb
    def multiply_pieces(acc, smem, barriers, part, i, count):
        for e in range(mma.size):
            acc[e] = ZERO
        sums = mma.fragment()  # the sum of one piece
        left = u32(count)
        while left > 0:
            size = u32(min(PIECE, left))
            left = u32(left - size)
            i = multiply(sums, smem, barriers, part, i, size)
            if left > 0:
                pipe.release(barriers, i)
                i = pipe.next(i)
            for e in range(mma.size):
                acc[e] += sums[e]
        return i

    return multiply_pieces


@noun
def slices_of(config: Sm90Config, found: Sm90Variant) -> Members:
    """Return the verbs that load and multiply slices of a and b, through a pipeline.

    i: number of the next slice in the pipeline; count: how many slices, at least one; both u32.
    """
    a_operand, b_operand = tiles_of(config, found.a, found.b)
    a_tile = box_tile(a_operand, 0, found.others, config.cluster.of_a)
    b_tile = box_tile(b_operand, config.stages * a_operand.nbytes, found.others, config.cluster.of_b)
    pipe = pipeline(config.stages, config.stage_bytes, 4 * config.consumers, config.cluster.blocks)
    mma = warpgroup_mma(found.product.dtype, a_operand, b_operand, found.parts)

    @verb
    def counts(extent):
        """Return the numbers of tiles along rows and along columns, and of slices of a product of matrices."""
        m_blocks = (extent.M + (config.block_m - 1)) // config.block_m
        n_blocks = (extent.N + (config.block_n - 1)) // config.block_n
        return m_blocks, n_blocks, u32((extent.K + (config.block_k - 1)) // config.block_k)

    @verb
    def load(smem, barriers, maps, corners, i, count):
        """Load slices by a's and b's tensor map, beginning at their corners. One thread calls it. Return i + count."""
        end = u32(i + count)
        a_corner, b_corner = corners
        k0 = i32(0)
        while i != end:
            stage = pipe.acquire(barriers, i)
            a_at = Corner(a_corner.row, i32(a_corner.depth + k0), a_corner.others)
            b_at = Corner(b_corner.row, i32(b_corner.depth + k0), b_corner.others)
            a_tile.load(smem, stage, maps[0], a_at, barriers.full)
            b_tile.load(smem, stage, maps[1], b_at, barriers.full)
            i = pipe.next(i)
            k0 = i32(k0 + config.block_k)
        return i

    @verb
    def multiply(acc, smem, barriers, part, i, count):
        stage = pipe.wait(barriers, i)
        mma.start(acc, smem, a_tile.at(stage), b_tile.at(stage), part)
        last = u32(i + count - 1)
        while i != last:
            i = pipe.next(i)
            stage = pipe.wait(barriers, i)
            mma.add(acc, smem, a_tile.at(stage), b_tile.at(stage), part)
            mma.wait_but_one(acc)
            pipe.release(barriers, i - 1)
        mma.wait(acc)
        return i

    if config.piece:
        multiply = in_pieces(config.piece, pipe, mma, multiply)
    return members(
        locals(),
        pipe=pipe,
        fragment=mma.fragment,  # () -> a local array for sums [64, BLOCK_N]
        # (acc, smem, barriers, part, i, count) -> i + count - 1, the slice that the caller releases:
        # acc = a @ b for rows 64 * part to 64 * part + 63 of a
        multiply=multiply,
    )
