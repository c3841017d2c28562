"""Matrices of 8 x 8 16-bit elements from the registers of a warp into shared memory, as products leave them (sm_90)."""

from __future__ import annotations

import numpy as np

from ..simulator import current, exchange
from .asm import family, instruction


@family(count=(1, 2, 4), trans=(False, True))
def stmatrix(count, trans=False):
    """Store `count` matrices, a register each: `ldmatrix` the other way round.

    Lane 8 * m + r brings the address of row r of matrix m, 16 bytes at a multiple of 16; the addresses of other lanes
    are not looked at. Lane l has elements 2 * (l % 4) and the next of row l // 4, the first in the lower half of a
    word; trans: of column l // 4.
    """
    name = f"stmatrix_x{count}_trans" if trans else f"stmatrix_x{count}"
    dot_trans = ".trans" if trans else ""

    @instruction(
        f"(shared[i32], u32[{count}][i32]) -> void",
        f"stmatrix.sync.aligned.m8n8.x{count}{dot_trans}.shared.b16 [{{y}}], {{values}};",
        section="9.7.14.5.16",
        convergent=True,
        name=name,
    )
    def store(y, index, values, values_index):
        """One to four matrices."""
        lane = current().lane
        row = y.vector(index, 16 // y.itemsize).view(np.uint16) if lane < 8 * count else None
        lanes = exchange(name, [int(values[values_index + m]) for m in range(count)], 0xFFFFFFFF)
        if row is None:
            return
        m, line = divmod(lane, 8)
        for k in range(8):
            source, half = (4 * k + line // 2, line % 2) if trans else (4 * line + k // 2, k % 2)
            row[k] = lanes[source][m] >> 16 * half & 0xFFFF

    return store
