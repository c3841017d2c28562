"""Long sums of products by tensor cores, without their drift.

Tensor cores round what they add to their accumulators toward zero: the error of a sum grows with its length, where that
of ordinary additions, which err to both sides, grows with the root of it. So the tensor cores add up a few slices, a
piece, and threads add the piece to the sum, which is float32's own (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, does
so for fp8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, f32, u32, verb
from ..tile.boxes import BoxTile
from ..tile.pipeline import Pipeline
from ..tile.warpgroup import WarpgroupMma


class Pieces(Namespace):
    """The verb of a warpgroup."""

    # (acc, smem, barriers, i, slices, part) -> the number behind the last filling: acc = the sum of so many slices,
    # from filling i on; part: as `WarpgroupMma.start` has it
    add_up: Callable[..., Any]


@cache
def sums_of_pieces(piece: int, pipe: Pipeline, mma: WarpgroupMma, a_tile: BoxTile, b_tile: BoxTile) -> Pieces:
    """For pieces of so many slices."""
    ZERO, PIECE, size = f32(0), u32(piece), mma.size

    @verb
    def add_up(acc, smem, barriers, i, slices, part):
        for e in range(size):
            acc[e] = ZERO
        sums = mma.fragment()  # of a piece
        end = u32(i + slices)
        while i != end:
            last = u32(i + min(PIECE, u32(end - i)) - 1)
            stage = pipe.wait(barriers, i)
            mma.start(sums, smem, a_tile.at(stage), b_tile.at(stage), part)
            while i != last:
                i = pipe.next(i)
                stage = pipe.wait(barriers, i)
                mma.add(sums, smem, a_tile.at(stage), b_tile.at(stage), part)
                mma.wait_but_one(sums)
                pipe.release(barriers, i - 1)
            mma.wait(sums)
            pipe.release(barriers, i)
            i = pipe.next(i)
            for e in range(size):
                acc[e] += sums[e]
        return i

    return Pieces(add_up=add_up)
