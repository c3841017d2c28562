"""What dbias loads: for each tile of scores lines of queries, Q's and dO's, and lines of keys, K's and V's.

Each kind has a ring of its own, whose fillings are, in turns, of its first array and of its second. One kind may stay
for the next tile of scores: K and V for other heads of the group and, where the bias has one row, for other queries; Q
and dO for other keys where it has one column. So of two rings one is filled for every tile of scores, number i, the
other when what stays is another, number `kept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...backend import Namespace, u32, verb
from ...tile.boxes import BoxTile, Corner
from ...tile.pipeline import Barriers, Pipeline
from .bias_walk import BiasWalk


class Lines(NamedTuple):
    """Tiles of both arrays of a ring, and their pipelines, whose barriers are the same."""

    first: BoxTile
    second: BoxTile
    first_pipe: Pipeline
    second_pipe: Pipeline


class RingOfLines(Namespace):
    """The verbs. number: of a pair of fillings."""

    barriers: Callable[..., Barriers]  # (): the shared arrays; once in a kernel, by all threads
    init: Callable[..., None]  # (barriers): by one thread, before a pipeline's `start`
    bring: Callable[..., None]  # (smem, maps, barriers, extent, offset, options): all of a block's; by one thread
    first: Callable[..., Any]  # (barriers, number) -> where the first array's begins in shared memory, once it is there
    second: Callable[..., Any]  # (barriers, number): the same of the second's
    # (barriers, number, last): read by my warp; last: for the last time, if they may stay
    release_first: Callable[..., None]
    release_second: Callable[..., None]  # (barriers, number, last)


def ring_of_lines(lines: Lines, walk: BiasWalk, *, of_keys: bool, stays: bool) -> RingOfLines:
    """of_keys: lines are keys; stays: they may stay for the next tile of scores."""
    first_tile, second_tile, first_pipe, second_pipe = lines

    @verb
    def barriers():
        return first_pipe.barriers()

    @verb
    def init(barriers):
        first_pipe.init(barriers)

    @verb
    def corner(visit):
        if of_keys:
            return Corner(visit.n0, 0, (visit.h_kv, visit.b))
        return Corner(visit.m0, 0, (visit.h, visit.b))

    @verb
    def load(smem, maps, barriers, visit, number):
        place = corner(visit)
        stage = first_pipe.acquire(barriers, u32(2 * number))
        first_tile.load(smem, stage, maps[0], place, barriers.full)
        stage = second_pipe.acquire(barriers, u32(2 * number + 1))
        second_tile.load(smem, stage, maps[1], place, barriers.full)

    @verb
    def bring(smem, maps, barriers, extent, offset, options):
        filling = u32(0)
        number, numbers = walk.first_number(), walk.numbers(extent)
        while number < numbers:
            part, there = walk.part(number, extent), False
            visit = walk.first(part, extent, offset, options)
            while visit.v < part.end:
                if not there:
                    load(smem, maps, barriers, visit, filling)
                    filling = first_pipe.next(filling)
                following = walk.after(visit, part, extent, offset, options)
                if stays:
                    there = walk.stays(visit, following)
                visit = following
            number = walk.next_number(number)

    @verb
    def first(barriers, number):
        return first_tile.at(first_pipe.wait(barriers, u32(2 * number)))

    @verb
    def second(barriers, number):
        return second_tile.at(second_pipe.wait(barriers, u32(2 * number + 1)))

    @verb
    def release_first(barriers, number, last):
        if not stays or last:
            first_pipe.release(barriers, u32(2 * number))

    @verb
    def release_second(barriers, number, last):
        if not stays or last:
            second_pipe.release(barriers, u32(2 * number + 1))

    return RingOfLines(
        barriers=barriers,
        init=init,
        bring=bring,
        first=first,
        second=second,
        release_first=release_first,
        release_second=release_second,
    )
