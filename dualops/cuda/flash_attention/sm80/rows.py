"""How many elements of a row are copied at once, of q say: as many as lie at multiples of 16, 8 or 4 bytes.

How attention's sm80 rung stores results: 16 rows of a warp through shared memory, a box's columns at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....spec import ArrayMeta
from ...compiler.backend import Members, Noun, cuda, f32, i32, noun, verb
from ...launch.views import is_stored_whole, start, vector_of
from ...tile.storage import access, storage
from ...tile.warp_rows import COLUMNS, warp_rows
from .config import pitch


class Vectors(NamedTuple):
    """Elements at once; 1 where rows lie anywhere."""

    q: int
    k: int
    v: int
    o: int


class GradientVectors(NamedTuple):
    """Elements at once of what the gradient loads."""

    q: int
    k: int
    v: int
    do: int


def vectors_of(metas: Mapping[str, ArrayMeta]) -> Vectors:
    """For all arrays of a call. Rows of o are stored by 16 bytes or one by one."""
    q, k, v, o = (vector_of(metas[name]) for name in Vectors._fields)
    return Vectors(q, k, v, o if is_stored_whole(metas["o"]) else 1)


def gradient_vectors_of(metas: Mapping[str, ArrayMeta]) -> GradientVectors:
    return GradientVectors(*(vector_of(metas[name]) for name in GradientVectors._fields))


Output = Noun  # what `output_of` makes


@noun
def output_of(dtype: str, columns: int, boxes: int, aligned: bool, widest: int = 0) -> Members:
    """The verb for rows of `columns` elements. aligned: rows begin at multiples of 16 bytes, and fill such. widest: the
    columns of the widest rows that the same warps store.

    Called by all lanes of a warp. row: the first of its four warps'.
    """
    itemsize, vec = storage(dtype).itemsize, access(dtype, aligned)
    width = pitch(columns, itemsize)
    # boxes of columns lie in registers as 16 rows each would
    lines = warp_rows(16 * boxes, width, pitch(widest, itemsize))

    @verb
    def store(smem, o, acc, task, row):
        """Store the rows of acc. smem: a shared array of f32."""
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
