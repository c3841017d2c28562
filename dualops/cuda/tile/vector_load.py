"""How a tile comes to shared memory by 16 bytes a thread."""

from __future__ import annotations

from typing import Any

from ..backend import cuda, i32, u32, verb
from .numbers import numbers
from .shared import Tile
from .storage import access, storage


def by_vectors(
    dtype: str, aligned: bool, tile: Tile, threads: int, *, weighted: bool = False, checked: bool = False
) -> Any:
    """The tile's `load` of a Part, (smem, part), or of the tile that begins at a place, (smem, part, at).

    Beyond the part's lines and columns all is 0. The tile's width: a power of two, at most as large as threads.
    `aligned`: first, step and columns are multiples of 16 bytes. `weighted`: lines are multiplied by their weights.
    `checked`: returns 1 if this thread met a NaN or an infinity.
    """
    mem, source, num = storage(dtype), access(dtype, aligned, once=True), numbers(storage(dtype).number)
    VECTOR, WIDTH, ROWS, WEIGHTED, CHECKED = source.vector, tile.width, tile.rows, weighted, checked
    ROWS_A_STEP = threads * VECTOR // WIDTH
    STEPS = -(-ROWS // ROWS_A_STEP)
    EACH = num.vector if VECTOR > 1 else 1
    FINITE, STRANGE = i32(0), i32(1)
    NONE, ALL = i32(0), i32(ROWS)

    @verb
    def load(smem, part, to=tile.at):
        frag = cuda.local.array(VECTOR, mem.number)
        strange = FINITE
        r, c = cuda.threadIdx.x * VECTOR // WIDTH, cuda.threadIdx.x * VECTOR % WIDTH
        there = i32(min(part.count, ROWS)) if c < part.columns else NONE  # rows of mine
        at, put = part.first + r * part.step + c, to + r * tile.row + c
        for step in range(STEPS):
            place = i32(r + step * ROWS_A_STEP)
            if (STEPS * ROWS_A_STEP == ROWS) | (place < ALL):
                source.load(frag, 0, part.data, at, place < there, num.zero)
                for i in range(VECTOR):
                    if WEIGHTED:
                        frag[i] *= smem[u32(part.weights + place)]
                    if CHECKED:
                        strange |= STRANGE if frag[i] * num.zero != num.zero else FINITE
                if VECTOR == 1:
                    smem[u32(put)] = frag[0]
                else:
                    for i in range(0, VECTOR, EACH):
                        num.store_vector(smem, put + i, frag, i)
            at += ROWS_A_STEP * part.step
            put += ROWS_A_STEP * tile.row
        return strange

    return load
