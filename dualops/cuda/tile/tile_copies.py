"""Copy an array's rows asynchronously to boxes of swizzled shared memory, from which a warp's products read them.

A tile [lines, width] is stored as boxes, one after the other. Each is a `warp_mma.FactorSlice`: all lines, and some
neighbouring elements of each. Elements outside of the array's rows or width become 0, and are not read.
"""

from __future__ import annotations

from ..compiler.backend import Members, cuda, i32, i64, kept_noun, u32, verb
from .async_copies import copies
from .warp_mma import FactorSlice, swizzled


@kept_noun
def tile_copies(box: FactorSlice, width: int, vector: int, threads: int) -> Members:
    """The verbs that copy rows of `width` elements, `vector` at a time. All threads of a block call them.

    A copy has 16, 8 or 4 bytes, or one element of 2 bytes, which goes through registers. The asynchronous copies are in
    no group yet. Raises ValueError if threads can't share a box.
    """
    units = copies(vector, box.itemsize)
    VECTOR, PITCH, BOX, SHIFT, FLIPS = units.vector, box.pitch, box.size, box.shift, box.flips
    BOXES = -(-width // PITCH)
    LINE = PITCH // VECTOR  # copies per line, by neighbouring threads
    LINES = threads // LINE  # lines from a thread's copy to its next
    COUNT = box.lines // LINES
    if box.line != PITCH or threads % LINE or LINES & (LINES - 1) or box.lines != COUNT * LINES:
        raise ValueError(f"{threads} threads can't share {box} in copies of {VECTOR}")
    NONE = u32(0)

    @verb
    def _place_of(place, i):
        """Return the place of the thread's copy number i. Lines are sums of powers of two, so their places add up,
        too."""
        further = i * LINES * PITCH
        return i32((place ^ (further >> SHIFT & FLIPS)) + further)

    @verb
    def load_some(smem, at, lines, columns):
        """Start to copy `columns` elements of each line; the others become zeros."""
        tid = u32(cuda.threadIdx.x)
        line, column = tid // u32(LINE), tid % u32(LINE) * u32(VECTOR)
        mine = i32(at + i32(swizzled(line * u32(PITCH) + column, SHIFT, FLIPS)))
        first = i64(lines.first) + i64(line) * i64(lines.step) + i64(column)
        left = i32(i32(lines.count) - i32(line))
        words = cuda.local.array(COUNT, u32)
        for b in range(BOXES):
            along = units.there(i32(columns - b * PITCH) - i32(column))
            index = first + b * PITCH
            for i in range(COUNT):
                there = along if i * LINES < left else NONE
                words[i] = units.start(smem, _place_of(mine, i) + b * BOX, lines.data, index, 1, there)
                index += LINES * lines.step
            if not units.asynchronous:
                for i in range(COUNT):
                    units.end(smem, _place_of(mine, i) + b * BOX, words[i])

    @verb
    def load(smem, at, lines):
        """Start to copy lines (`shared.Lines`) to the place `at`."""
        load_some(smem, at, lines, width)

    return locals()
