"""Copies of slices of a factor from global memory to shared memory through registers, in any layout.

A slice is [DEPTH, BLOCK]: DEPTH steps of the sum, each with BLOCK neighbouring rows of a (or columns of b). It has this
layout for any layout in global memory, so that the product reads 16 bytes of neighbours at a time.

    along "row"     rows are contiguous in global memory (a transposed, b plain)
    along "depth"   steps of the sum are contiguous (a plain, b transposed): the store transposes the slice
    vector          elements of a load: 16 bytes of them, or 1 if the layout does not allow that

With vector 1 any layout is possible, and neighbouring threads read neighbours along `along`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, cuda, i32, kept_noun, verb
from ..tile.numbers import numbers
from ..tile.shared import Tile
from ..tile.storage import access, storage


class Reading(NamedTuple):
    """How a factor is read; see the module's docstring."""

    along: str
    vector: int


class Share(NamedTuple):
    """The place of a thread's first load in a slice."""

    row: Any
    depth: Any


@kept_noun
def loader(dtype: str, reading: Reading, slices: Tile, threads: int) -> Members:
    """The verbs of a thread that loads its share of slices of x, a Factor.

    Raises ValueError if the threads can't share a slice evenly.
    """
    ALONG_DEPTH, VECTOR, depth, block = reading.along == "depth", reading.vector, slices.rows, slices.width
    LINE = (depth if ALONG_DEPTH else block) // VECTOR  # loads of a line, which neighbouring threads share
    LINES = threads // LINE  # lines from a thread's load to its next
    COUNT = block * depth // (VECTOR * threads)
    if COUNT < 1 or threads % LINE or block * depth != COUNT * LINES * LINE * VECTOR:
        raise ValueError(f"{threads} threads can't share a slice of {block} x {depth} in loads of {VECTOR}")
    vec, num = access(dtype, VECTOR > 1, once=True), numbers(storage(dtype).number)

    @verb
    def share():
        """Return the thread's Share."""
        tid = cuda.threadIdx.x
        if ALONG_DEPTH:
            return Share(i32(tid // LINE), i32(tid % LINE * VECTOR))
        return Share(i32(tid % LINE * VECTOR), i32(tid // LINE))

    @verb
    def start(x, matrix, row, share):
        """Return the index in x at which this thread's part of slice 0 begins.

        The slice begins at row `row` of the matrix at x[matrix].
        """
        return matrix + (row + share.row) * x.row + share.depth * x.depth

    @verb
    def fetch(frag, x, index, rows_left, depth_left):
        """Load from x[index] on.

        The factor has rows_left rows and depth_left steps from the share's first one on, none if below 1. Elements
        beyond them are 0.
        """
        step, lines, along = (x.row, rows_left, depth_left) if ALONG_DEPTH else (x.depth, depth_left, rows_left)
        for i in range(COUNT):
            keep = (i * LINES < lines) & (along > 0)
            vec.load(frag, i * VECTOR, x.data, index + i * LINES * step, keep, num.zero)

    @verb
    def put(smem, stage, share, frag):
        """Store to the stage that begins at `stage`."""
        at = i32(stage + slices.at + share.depth * slices.row + share.row)
        for i in range(COUNT):
            if ALONG_DEPTH:
                for c in range(VECTOR):
                    num.store_shared(smem, at + c * slices.row + i * LINES, frag[i * VECTOR + c])
            elif VECTOR == 1:
                num.store_shared(smem, at + i * LINES * slices.row, frag[i])
            else:
                for c in range(0, VECTOR, num.vector):
                    num.store_vector(smem, at + i * LINES * slices.row + c, frag, i * VECTOR + c)

    return locals()
