"""What dbias loads: for each tile of scores lines of queries, Q's and dO's, and lines of keys, K's and V's.

Each kind has a ring of its own, whose fillings are, in turns, of its first array and of its second. One kind may stay
for the next tile of scores: K and V for other heads of the group and, where the bias has one row, for other queries; Q
and dO for other keys where it has one column. So of two rings one is filled for every tile of scores, number i, the
other when what stays is another, number `kept`.
"""

from __future__ import annotations

from typing import NamedTuple

from ...compiler.backend import Members, noun, u32, verb
from ...tile.boxes import BoxTile, Corner
from ...tile.pipeline import Pipeline
from .bias_tile_scheduler import BiasWalk


class Lines(NamedTuple):
    """Tiles of both arrays of a ring, and their pipelines, whose barriers are the same."""

    first: BoxTile
    second: BoxTile
    first_pipe: Pipeline
    second_pipe: Pipeline


@noun
def ring_of_lines(lines: Lines, walk: BiasWalk, *, of_keys: bool, stays: bool) -> Members:
    """The verbs. number: of a pair of fillings.

    of_keys: lines are keys; stays: they may stay for the next tile of scores.
    """
    first_tile, second_tile, first_pipe, second_pipe = lines

    @verb
    def barriers():
        """Return the barriers in shared arrays; once in a kernel, by all threads."""
        return first_pipe.barriers()

    @verb
    def init(barriers):
        """Initialize the barriers; by one thread, before a pipeline's `start`."""
        first_pipe.init(barriers)

    @verb
    def _corner(visit):
        if of_keys:
            return Corner(visit.n0, 0, (visit.h_kv, visit.b))
        return Corner(visit.m0, 0, (visit.h, visit.b))

    @verb
    def _load(smem, maps, barriers, visit, number):
        place = _corner(visit)
        stage = first_pipe.acquire(barriers, u32(2 * number))
        first_tile.load(smem, stage, maps[0], place, barriers.full)
        stage = second_pipe.acquire(barriers, u32(2 * number + 1))
        second_tile.load(smem, stage, maps[1], place, barriers.full)

    @verb
    def bring(smem, maps, barriers, extent, offset, options):
        """Load all lines of a block; by one thread."""
        filling = u32(0)
        number, numbers = walk.first_number(), walk.numbers(extent)
        while number < numbers:
            part, there = walk.part(number, extent), False
            visit = walk.first(part, extent, offset, options)
            while visit.v < part.end:
                if not there:
                    _load(smem, maps, barriers, visit, filling)
                    filling = first_pipe.next(filling)
                following = walk.after(visit, part, extent, offset, options)
                if stays:
                    there = walk.stays(visit, following)
                visit = following
            number = walk.next_number(number)

    @verb
    def first(barriers, number):
        """Wait for the first array's lines. Return where they begin in shared memory."""
        return first_tile.at(first_pipe.wait(barriers, u32(2 * number)))

    @verb
    def second(barriers, number):
        """Wait for the second array's lines. Return where they begin in shared memory."""
        return second_tile.at(second_pipe.wait(barriers, u32(2 * number + 1)))

    @verb
    def release_first(barriers, number, last):
        """Release what my warp has read. last: for the last time, if lines may stay."""
        if not stays or last:
            first_pipe.release(barriers, u32(2 * number))

    @verb
    def release_second(barriers, number, last):
        if not stays or last:
            second_pipe.release(barriers, u32(2 * number + 1))

    return locals()
