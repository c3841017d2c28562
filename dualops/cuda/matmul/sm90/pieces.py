"""Accurate long sums of tensor-core products: tensor cores add up pieces, threads add the pieces.

Tensor cores round additions to their accumulators toward zero, so the error of a sum grows with its length. CUDA cores
round additions to nearest, so their error grows with the square root of the length. So tensor cores add up only a few
slices (a piece), and threads add the piece to a float32 sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, does so for
fp8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import f32, u32, verb
from ...tile.pipeline import Pipeline
from ...tile.warpgroup import WarpgroupMma


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
