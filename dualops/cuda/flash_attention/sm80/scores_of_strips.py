"""The scores of a warp that has several strips of 16 queries, APART from one another: each goes through the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Members, cuda, f32, i32, noun, verb
from ...tile.numbers import numbers
from ...tile.strips import APART
from ...tile.unrolled import one_after_another
from ..fragment_scores import FragmentScores
from ..tiles import Where
from .config import ROW_BYTES


def part_of(size: int, strip: int) -> Callable[..., Any]:
    """The verb (acc) -> a strip's `size` numbers."""
    FIRST = size * strip

    @verb
    def take(acc):
        part = cuda.local.array(size, f32)
        for e in range(size):
            part[e] = acc[FIRST + e]
        return part

    return take


def scores_of_strips(score: FragmentScores, size: int, strips: int) -> FragmentScores:
    """The verbs of tiles of which a thread has `size` scores a strip; of more than one, no probability is dropped."""
    if strips == 1:
        return score

    def each(of_tile: Callable[..., None]) -> Callable[..., None]:
        def of_strip(strip: int) -> Callable[..., None]:
            take, FIRST, FURTHER = part_of(size, strip), size * strip, APART * strip

            @verb
            def one(scores, options, scale, where):
                part = take(scores)
                m0 = i32(where.m0 + FURTHER)
                of_tile(part, options, scale, Where(where.b, where.h, m0, where.n0, where.Sq, where.Sk, where.offset))
                for e in range(size):
                    scores[FIRST + e] = part[e]

            return one

        return one_after_another([of_strip(strip) for strip in range(strips)])

    return score.but(finish=each(score.finish))


@noun
def rows_kept(at: int) -> Members:
    """The verbs of a thread's own place. row_max, row_sum: local arrays of four.

    Maxima and sums of four rows, in shared memory from byte `at` on while products need the registers.
    """
    num, FIRST, EACH = numbers(f32), at // 4, ROW_BYTES // 4

    @verb
    def load(row_max, row_sum):
        smem, mine = cuda.shared.array(0, f32, alignment=128), i32(FIRST + i32(cuda.threadIdx.x) * EACH)
        num.load_four(row_max, 0, smem, mine)
        num.load_four(row_sum, 0, smem, i32(mine + 4))

    @verb
    def store(row_max, row_sum):
        smem, mine = cuda.shared.array(0, f32, alignment=128), i32(FIRST + i32(cuda.threadIdx.x) * EACH)
        num.store_vector(smem, mine, row_max, 0)
        num.store_vector(smem, i32(mine + 4), row_sum, 0)

    return locals()
