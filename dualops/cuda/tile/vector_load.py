"""Tiles of shared memory that are loaded 16 bytes per thread at a time."""

from __future__ import annotations

from typing import Any

from ..compiler.backend import cuda, i32, u32, verb
from .numbers import numbers
from .shared import Shared, Tile
from .storage import access, storage


def vector_tile(
    shared: Shared,
    rows: int,
    width: int,
    *,
    aligned: bool,
    dtype: str = "",
    weighted: bool = False,
    checked: bool = False,
    **options: Any,
) -> Tile:
    """Allocate a tile (`Shared.tile`, with its options). (smem, part) of its verb `load` loads a Part, (smem, part, at)
    loads it into the stage at `at`.

    Elements outside of the part's lines and columns become 0. The tile's width is a power of two, at most as many
    vectors as threads. aligned: first, step and columns are multiples of 16 bytes. dtype: of the array, by default that
    of `shared`. weighted: lines are multiplied by their weights. checked: `load` returns 1 if this thread loaded a NaN
    or an infinity.
    """
    dtype, threads, tile = dtype or shared.dtype, shared.threads, shared.tile(rows, width, **options)
    mem, source, num = storage(dtype), access(dtype, aligned, once=True), numbers(storage(dtype).number)
    at_once = threads * source.vector // tile.width  # lines that all threads load together
    steps = -(-tile.rows // at_once)
    whole = steps * at_once == tile.rows

    @verb
    def load(smem, part, at=tile.at):
        frag = cuda.local.array(source.vector, mem.number)
        non_finite = i32(0)
        r, c = cuda.threadIdx.x * source.vector // tile.width, cuda.threadIdx.x * source.vector % tile.width
        count = i32(min(part.count, tile.rows)) if c < part.columns else i32(0)  # of lines, for my columns
        index, place = part.first + r * part.step + c, at + r * tile.row + c
        for step in range(steps):
            line = i32(r + step * at_once)
            if whole | (line < i32(tile.rows)):
                source.load(frag, 0, part.data, index, line < count, num.zero)
                for i in range(source.vector):
                    if weighted:
                        frag[i] *= smem[u32(part.weights + line)]
                    if checked:
                        non_finite |= i32(frag[i] * num.zero != num.zero)
                if source.vector == 1:
                    smem[u32(place)] = frag[0]
                else:
                    for i in range(0, source.vector, num.vector):
                        num.store_vector(smem, place + i, frag, i)
            index += at_once * part.step
            place += at_once * tile.row
        return non_finite

    return tile.but(load=load)
