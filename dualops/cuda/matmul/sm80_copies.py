"""Copies of slices of a factor to shared memory, while the block multiplies earlier slices.

A line of a slice is contiguous in memory, see `tile.warp_mma`. Neighbouring threads copy neighbours of a line; a
thread's copies have the same columns of lines at equal distances. Elements beyond the factor's rows or the end of the
sum become 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, i64, kept_noun, members, u32, verb
from ..tile.async_copies import copies
from ..tile.warp_mma import FactorSlice, swizzled
from .loading import Reading
from .product import Factor, Variant, product_axes


class Terms(NamedTuple):
    """The sum: the terms and slices of each round, and the sizes of the outer axes."""

    K: Any
    slices: Any  # slices per round
    outers: Any


class Part(NamedTuple):
    """A thread's part of the slices of a factor."""

    x: Factor
    start: Any  # index in x of its first element of slice 0
    place: Any  # place of that element in a stage's slice
    depth: Any  # its first step in a slice
    rows: Any  # rows of x from its first row on, below 1 if none


class Coming(NamedTuple):
    """A thread's part of one slice."""

    first: Any  # index of its first element in x
    there: Any  # existing elements of a copy, see `tile.async_copies`
    lines: Any  # existing lines, from its first line on


@kept_noun
def slice_copies(found: Variant, config: Any, rows: int, reading: Reading) -> Members:
    """The verbs of a thread that copies its part of slices of `rows` rows.

    words: a local array of the words that copies through registers return. Raises ValueError if the threads can't share
    a slice evenly.
    """
    slices = FactorSlice(reading.along, rows, config.block_k, config.itemsize)
    units, axes, threads = copies(reading.vector, config.itemsize), product_axes(found), config.threads
    SHIFT, FLIPS = slices.shift, slices.flips
    ALONG_DEPTH, VECTOR, PITCH, BOX = slices.along == "depth", units.vector, slices.pitch, slices.box
    LINE = slices.line // VECTOR  # copies of a line, which neighbouring threads share
    LINES = threads // LINE  # lines from a thread's copy to its next
    COUNT = slices.size // (VECTOR * threads)
    if COUNT < 1 or threads % LINE or LINES & (LINES - 1) or slices.lines != COUNT * LINES:
        raise ValueError(f"{threads} threads can't share {slices} in copies of {VECTOR}")
    SAME_BITS, NONE = LINES % 8 == 0, u32(0)  # the swizzle's pattern has 8 lines: all of a thread's lines share bits

    @verb
    def part(x, matrix, row, count):
        """Return the Part of the matrix that begins at x[matrix] and has `count` rows, from row number `row` on."""
        tid = u32(cuda.threadIdx.x)
        line, column = tid // u32(LINE), tid % u32(LINE) * u32(VECTOR)
        plain = column // u32(PITCH) * u32(BOX) + line * u32(PITCH) + column % u32(PITCH)
        place = i32(swizzled(plain, SHIFT, FLIPS))
        my_row, my_depth = (i32(line), i32(column)) if ALONG_DEPTH else (i32(column), i32(line))
        start = matrix + (row + my_row) * x.row + my_depth * x.depth
        return Part(x, start, place, my_depth, i32(i32(min(count - row, i64(rows))) - my_row))

    @verb
    def coming(part, terms, t):
        """Return the Coming of slice number t."""
        first, s = part.start, i64(t)
        if found.has_rounds:
            first += axes.outer.at_32(u32(t) // u32(terms.slices), terms.outers, part.x.outer)
            s = i64(u32(t) % u32(terms.slices))
        depth = i32(min(terms.K - s * slices.depth, i64(slices.depth))) - part.depth
        along, lines = (depth, part.rows) if ALONG_DEPTH else (part.rows, depth)
        return Coming(first + s * slices.depth * part.x.depth, units.there(along), i32(lines))

    @verb
    def _place_of(part, at, i):
        flip = 0 if SAME_BITS else i * (LINES * PITCH) >> SHIFT & FLIPS
        return i32(((at + part.place) ^ flip) + i * (LINES * PITCH))

    @verb
    def start(words, smem, at, part, coming, share):
        """Start to copy one of the Config's shares to the stage's slice that begins at `at`."""
        step, apart = (part.x.row, part.x.depth) if ALONG_DEPTH else (part.x.depth, part.x.row)
        index = coming.first
        for i in range(COUNT):
            if i % config.shares == share:
                there = coming.there if i * LINES < coming.lines else NONE
                words[i] = units.start(smem, _place_of(part, at, i), part.x.data, index, apart, there)
            index += LINES * step

    @verb
    def end(words, smem, at, part):
        """Finish copies that are not asynchronous."""
        if not units.asynchronous:
            for i in range(COUNT):
                units.end(smem, _place_of(part, at, i), words[i])

    return members(locals(), words=COUNT, slices=slices)
