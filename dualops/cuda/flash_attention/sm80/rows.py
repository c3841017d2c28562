"""How sm80's kernels copy and store rows: several elements at once, if they are aligned; results through
shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....spec import ArrayMeta
from ...compiler.backend import Members, Noun, cuda, f32, i32, noun, verb
from ...launch.views import is_stored_whole, start, vector_of
from ...tile.storage import access
from ...tile.tile_copies import tile_copies
from ...tile.warp_rows import COLUMNS, warp_rows
from ..arguments import Variant
from ..tiles import lines
from .config import Sm80Config, Sm80DkvConfig, Sm80DkvTiles, Sm80DqConfig, pitch


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


class KeyHead(NamedTuple):
    """Batch and head whose keys are copied."""

    b: Any
    h: Any


def vectors_of(metas: Mapping[str, ArrayMeta]) -> Vectors:
    """Return the vectors of a call. Rows of o are stored 16 bytes at a time or one by one."""
    q, k, v, o = (vector_of(metas[name]) for name in Vectors._fields)
    return Vectors(q, k, v, o if is_stored_whole(metas["o"]) else 1)


def gradient_vectors_of(metas: Mapping[str, ArrayMeta]) -> GradientVectors:
    return GradientVectors(*(vector_of(metas[name]) for name in GradientVectors._fields))


@noun
def kv_copies(config: Sm80Config | Sm80DqConfig, variant: Variant, tiles: Any, vectors: Any) -> Members:
    """The verbs that start the copies of a kernel that owns queries. vectors: `Vectors` or `GradientVectors`."""
    q, k = (tile_copies(getattr(tiles, name), variant.D, getattr(vectors, name), config.threads) for name in "qk")
    v = tile_copies(tiles.v, variant.Dv, vectors.v, config.threads)
    GRADIENT = isinstance(config, Sm80DqConfig)
    do, DO_AT = (tile_copies(tiles.do, variant.Dv, vectors.do, config.threads), tiles.do_at) if GRADIENT else (q, 0)

    @verb
    def queries(smem, x, task):
        """Copy Q, and dO for a gradient."""
        q.load(smem, 0, lines(x.q, task.b, task.h, task.q_first + task.m0, task.Sq - task.m0))
        if GRADIENT:
            do.load(smem, DO_AT, lines(x.do, task.b, task.h, task.q_first + task.m0, task.Sq - task.m0))

    @verb
    def keys(smem, x, task, head, n0, places):
        """Copy K and V of a head from key n0 on to these places."""
        k_at, v_at = places
        k.load(smem, k_at, lines(x.k, head.b, head.h, task.k_first + n0, task.Sk - n0))
        v.load(smem, v_at, lines(x.v, head.b, head.h, task.k_first + n0, task.Sk - n0))

    return locals()


@noun
def q_copies(config: Sm80DkvConfig, variant: Variant, tiles: Sm80DkvTiles, vectors: GradientVectors) -> Members:
    """The verbs that start the copies of a kernel that owns keys."""
    q, k = (tile_copies(getattr(tiles, name), variant.D, getattr(vectors, name), config.threads) for name in "qk")
    v = tile_copies(tiles.v, variant.Dv, vectors.v, config.threads)
    do = tile_copies(tiles.do, variant.Dv, vectors.do, config.threads)

    @verb
    def keys(smem, x, task):
        """Copy K and V."""
        token, count = task.k_first + task.n0, task.Sk - task.n0
        k.load(smem, 0, lines(x.k, task.b, task.h_kv, token, count))
        v.load(smem, tiles.v_at, lines(x.v, task.b, task.h_kv, token, count))

    @verb
    def queries(smem, x, task, h, m0, stage):
        """Copy Q and dO of a head from query m0 on into a stage."""
        token, count = task.q_first + m0, task.Sq - m0
        q.load(smem, i32(tiles.q_at + stage * tiles.q_size), lines(x.q, task.b, h, token, count))
        do.load(smem, i32(tiles.do_at + stage * tiles.do_size), lines(x.do, task.b, h, token, count))

    return locals()


Output = Noun  # of `output_of`


@noun
def output_of(dtype: str, columns: int, boxes: int, aligned: bool, widest: int = 0) -> Members:
    """The verb that stores rows of `columns` elements, 16 rows of a warp at a time through shared memory. aligned: rows
    start and end at multiples of 16 bytes. widest: columns of the widest rows that the same warps store.
    """
    vec, width = access(dtype, aligned), pitch(columns)
    # in registers, a box of columns has the layout of 16 rows
    lines = warp_rows(16 * boxes, width, pitch(widest))

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
