"""How a slice of a factor comes from global memory into shared memory, by way of registers, in any layout.

A slice is [DEPTH, BLOCK]: DEPTH steps of the sum, and of each BLOCK neighbouring rows of a (or columns of b) side by
side, whatever the layout in global memory: the product then reads 16 bytes of neighbours at a time. Lines in shared
memory lie PAD numbers further apart than they are long.

    along "row"     neighbours of the slice are neighbours in memory (a transposed, b plain)
    along "depth"   steps of the sum are (a plain, b transposed): a slice is transposed as it is put down
    vector          elements that are loaded at once: 16 bytes, or 1 where the layout does not allow that

With vector 1 the layout may be any at all, and `along` is what neighbouring threads read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..backend import Namespace, cuda, i32, verb
from ..tile.numbers import numbers
from ..tile.storage import access, storage

PAD = 4  # numbers


class Reading(NamedTuple):
    """How a factor is read; see the module's docstring."""

    along: str
    vector: int


class Loader(Namespace):
    """The verbs of a thread that loads its share of slices."""

    size: int  # of its share, in elements
    first: Callable[..., Any]  # () -> row, depth: where in a slice the thread's first load is
    fetch: Callable[..., None]  # (frag, x, index, rows_left, depth_left): from memory; what is not left is 0
    put: Callable[..., None]  # (smem, to, row, depth, frag): to shared memory


@cache
def loader(dtype: str, reading: Reading, block: int, depth: int, threads: int) -> Loader:
    """The verbs for slices of `block` rows and `depth` steps. x: a Factor; index: of its first element for the thread.

    rows_left and depth_left: how many rows and steps there are from the thread's first one on, below 1 if none.
    """
    ALONG_DEPTH, VECTOR = reading.along == "depth", reading.vector
    LINE = (depth if ALONG_DEPTH else block) // VECTOR  # loads of a line, which neighbouring threads share
    LINES = threads // LINE  # lines from a thread's load to its next
    COUNT = block * depth // (VECTOR * threads)
    if COUNT < 1 or threads % LINE or block * depth != COUNT * LINES * LINE * VECTOR:
        raise ValueError(f"{threads} threads can't share a slice of {block} x {depth} in loads of {VECTOR}")
    ROW = block + PAD
    vec, num = access(dtype, VECTOR > 1, once=True), numbers(storage(dtype).number)

    @verb
    def first_along_depth():
        tid = cuda.threadIdx.x
        return i32(tid // LINE), i32(tid % LINE * VECTOR)

    @verb
    def first_along_row():
        tid = cuda.threadIdx.x
        return i32(tid % LINE * VECTOR), i32(tid // LINE)

    @verb
    def fetch_along_depth(frag, x, index, rows_left, depth_left):
        for i in range(COUNT):
            keep = (i * LINES < rows_left) & (depth_left > 0)
            vec.load(frag, i * VECTOR, x.data, index + i * LINES * x.row, keep, num.zero)

    @verb
    def fetch_along_row(frag, x, index, rows_left, depth_left):
        for i in range(COUNT):
            keep = (i * LINES < depth_left) & (rows_left > 0)
            vec.load(frag, i * VECTOR, x.data, index + i * LINES * x.depth, keep, num.zero)

    @verb
    def put_along_depth(smem, to, row, depth, frag):
        at = i32(to + depth * ROW + row)
        for i in range(COUNT):
            for c in range(VECTOR):
                num.store_shared(smem, at + c * ROW + i * LINES, frag[i * VECTOR + c])

    @verb
    def put_along_row(smem, to, row, depth, frag):
        at = i32(to + depth * ROW + row)
        for i in range(COUNT):
            if VECTOR == 1:
                num.store_shared(smem, at + i * LINES * ROW, frag[i])
            else:
                for c in range(0, VECTOR, num.vector):
                    num.store_vector(smem, at + i * LINES * ROW + c, frag, i * VECTOR + c)

    size = COUNT * VECTOR
    if ALONG_DEPTH:
        return Loader(size=size, first=first_along_depth, fetch=fetch_along_depth, put=put_along_depth)
    return Loader(size=size, first=first_along_row, fetch=fetch_along_row, put=put_along_row)
