"""How sm80's kernels copy and store rows: several elements at once, if they are aligned; results through
shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....spec import ArrayMeta
from ...compiler.backend import Members, Noun, cuda, f32, i32, noun, verb
from ...launch.views import is_stored_whole, start, vector_of
from ...tile.storage import access, storage
from ...tile.tile_copies import tile_copies
from ...tile.warp_rows import COLUMNS, warp_rows
from ..arguments import Variant
from .config import pitch


class Vectors(NamedTuple):
    """Elements of a copy, or of a store of o; 1 without alignment."""

    q: int
    k: int
    v: int
    o: int


class GradientVectors(NamedTuple):
    """Elements of a copy, for the inputs of the gradient."""

    q: int
    k: int
    v: int
    do: int


def vectors_of(metas: Mapping[str, ArrayMeta]) -> Vectors:
    """Return the vectors of a call. Rows of o are stored 16 bytes at a time or one by one."""
    q, k, v, o = (vector_of(metas[name]) for name in Vectors._fields)
    return Vectors(q, k, v, o if is_stored_whole(metas["o"]) else 1)


def gradient_vectors_of(metas: Mapping[str, ArrayMeta]) -> GradientVectors:
    return GradientVectors(*(vector_of(metas[name]) for name in GradientVectors._fields))


class Copies(NamedTuple):
    """The nouns of what is copied to shared memory (`tile_copies`)."""

    q: Noun
    k: Noun
    v: Noun
    do: Any = None  # of a gradient


def copies_of(
    variant: Variant, tiles: Any, vectors: Vectors | GradientVectors, threads: int, *, paired: bool = False
) -> Copies:
    """Return the copies of a kernel with these tiles, and of dO for a gradient. paired: as in `tile_copies`, of V."""
    q, k = (tile_copies(getattr(tiles, name), variant.D, getattr(vectors, name), threads) for name in "qk")
    v = tile_copies(tiles.v, variant.Dv, vectors.v, threads, paired=paired)
    if not isinstance(vectors, GradientVectors):
        return Copies(q, k, v)
    return Copies(q, k, v, tile_copies(tiles.do, variant.Dv, vectors.do, threads))


Output = Noun  # of `output_of`


@noun
def output_of(dtype: str, columns: int, boxes: int, aligned: bool, widest: int = 0) -> Members:
    """The verb that stores rows of `columns` elements, 16 rows of a warp at a time through shared memory. aligned: rows
    start and end at multiples of 16 bytes. widest: columns of the widest rows that the same warps store.
    """
    itemsize, vec = storage(dtype).itemsize, access(dtype, aligned)
    width = pitch(columns, itemsize)
    # in registers, a box of columns has the layout of 16 rows
    lines = warp_rows(16 * boxes, width, pitch(widest, itemsize))

    @verb
    def store(smem, o, acc, task, row):
        """Store the rows of acc; by all lanes of a warp. smem: a shared array of f32. row: the first of its
        four warps.
        """
        values = cuda.local.array(COLUMNS, f32)
        first = i32(row + cuda.threadIdx.x % 128 // 32 * 16)
        box = i32(0)
        while box < boxes:
            lines.put(smem, acc, box)
            line, n = lines.row(), i32(box * width + lines.column())
            while line < 16:
                i = i32(task.m0 + first + line)
                if i < task.Sq:
                    lines.take(values, smem, line)
                    at = start(o, task.b, task.h, task.q_first + i) + n
                    for c in range(0, COLUMNS, vec.vector):
                        vec.store(o.data, at + c, n + c < columns, values, c)
                line = i32(line + lines.apart)
            lines.release()
            box = i32(box + 1)

    return locals()
