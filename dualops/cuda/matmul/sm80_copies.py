"""How slices of a factor come to shared memory, while the block multiplies those before.

A line of a slice is what is contiguous in memory, see `tile.warp_mma`; neighbouring threads copy neighbours of a line, and
so many lines further on the same of others. What is beyond the factor's rows or the end of the sum becomes 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..backend import Namespace, cuda, i32, i64, u32, verb
from ..tile.async_copies import copies
from ..tile.warp_mma import FactorSlice, swizzled
from .loading import Reading
from .product import Factor, Variant, product_axes


class Terms(NamedTuple):
    """The sum: how many terms each round has, in how many slices, and the sizes of the outer axes."""

    K: Any
    slices: Any  # of a round
    outers: Any


class Part(NamedTuple):
    """A thread's part of the slices of a factor."""

    x: Factor
    start: Any  # its first element in x, of slice 0
    place: Any  # where that comes to in a slice
    depth: Any  # its first step in a slice
    rows: Any  # that are there from its first one on


class SliceCopies(Namespace):
    """The verbs of a thread that copies its part of slices. words: a local array, see `tile.async_copies`."""

    words: int
    # (x, matrix, row, rows) -> Part, of the matrix that begins at x[matrix], from row number `row` of `rows` on
    part: Callable[..., Any]
    start: Callable[..., None]  # (words, smem, at, part, terms, t): slice number t, to the place `at`
    end: Callable[..., None]  # (words, smem, at, part): what is no asynchronous copy


@cache
def slice_copies(found: Variant, config: Any, rows: int, vector_reading: Reading) -> SliceCopies:
    """The verbs for slices of `rows` rows. Raises ValueError where threads can't share one."""
    slices = FactorSlice(vector_reading.along, rows, config.block_k)
    units, axes, threads = copies(vector_reading.vector), product_axes(found), config.threads
    ALONG_DEPTH, VECTOR, PITCH, BOX = slices.along == "depth", units.vector, slices.pitch, slices.box
    LINE = slices.line // VECTOR  # copies of a line, which neighbouring threads share
    LINES = threads // LINE  # lines from a thread's copy to its next
    COUNT = slices.size // (VECTOR * threads)
    if COUNT < 1 or threads % LINE or LINES & (LINES - 1) or slices.lines != COUNT * LINES:
        raise ValueError(f"{threads} threads can't share {slices} in copies of {VECTOR}")
    # places of a thread's lines: so much further on, and by other bits of the swizzle
    flip = _flips(LINES, PITCH)

    @verb
    def part(x, matrix, row, count):
        tid = u32(cuda.threadIdx.x)
        line, column = tid // u32(LINE), tid % u32(LINE) * u32(VECTOR)
        place = i32(swizzled(column // u32(PITCH) * u32(BOX) + line * u32(PITCH) + column % u32(PITCH), PITCH))
        my_row, my_depth = (i32(line), i32(column)) if ALONG_DEPTH else (i32(column), i32(line))
        start = matrix + (row + my_row) * x.row + my_depth * x.depth
        return Part(x, start, place, my_depth, i32(min(count - row, i64(rows))) - my_row)

    @verb
    def index_of(part, terms, t):
        if found.has_rounds:
            r = u32(t) // u32(terms.slices)
            s = u32(t) % u32(terms.slices)
            return part.start + axes.outer.at(i64(r), terms.outers, part.x.outer) + i64(s) * slices.depth * part.x.depth
        return part.start + t * slices.depth * part.x.depth

    @verb
    def depth_of(part, terms, t):
        s = i64(u32(t) % u32(terms.slices)) if found.has_rounds else t
        return i32(min(terms.K - s * slices.depth, i64(slices.depth))) - part.depth

    @verb
    def start_along_depth(words, smem, at, part, terms, t):
        index, depth = index_of(part, terms, t), depth_of(part, terms, t)
        for i in range(COUNT):
            to = i32(((at + part.place) ^ flip(i)) + i * (LINES * PITCH))
            count = depth if i * LINES < part.rows else i32(0)
            units.start(words, i, smem, to, part.x.data, index + i * LINES * part.x.row, part.x.depth, count)

    @verb
    def start_along_row(words, smem, at, part, terms, t):
        index, depth = index_of(part, terms, t), depth_of(part, terms, t)
        for i in range(COUNT):
            to = i32(((at + part.place) ^ flip(i)) + i * (LINES * PITCH))
            count = part.rows if i * LINES < depth else i32(0)
            units.start(words, i, smem, to, part.x.data, index + i * LINES * part.x.depth, part.x.row, count)

    @verb
    def end(words, smem, at, part):
        if not units.asynchronous:
            for i in range(COUNT):
                units.end(words, i, smem, i32(((at + part.place) ^ flip(i)) + i * (LINES * PITCH)))

    start = start_along_depth if ALONG_DEPTH else start_along_row
    return SliceCopies(words=max(1, COUNT * units.words), part=part, start=start, end=end)


def _flips(lines: int, pitch: int) -> Callable[..., Any]:
    """The verb (i) -> the bits of a place that change with the swizzle, i * lines further on."""
    LINES, PITCH = lines, pitch
    if lines % 8 == 0:  # the swizzle's pattern repeats

        @verb
        def none(i):
            return 0

        return none

    @verb
    def flip(i):
        return i * (LINES * PITCH) >> 3 & PITCH - 8

    return flip
