"""Store 8 x 8 matrices of 16-bit elements from a warp's registers, in products' layout, to shared memory (sm_90)."""

from __future__ import annotations

from ..simulator import current, exchange
from .asm import family, instruction
from .ldmatrix import ROW


@family(count=(1, 2, 4), trans=(False, True))
def stmatrix(count, trans=False):
    """Store `count` matrices, one register per lane each: the inverse of `ldmatrix`.

    Lane 8 * m + r passes the address of row r of matrix m: 16 bytes at a multiple of 16. The addresses of other lanes
    are ignored. Lane l has elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l // 4, the first in the lower half of the
    word. trans: those of column l // 4.
    """
    name = f"stmatrix_x{count}_trans" if trans else f"stmatrix_x{count}"
    dot_trans = ".trans" if trans else ""
    # for each line of a matrix: the lanes whose words have its elements, and the shifts of these
    places = [
        [(4 * k + i // 2, 16 * (i % 2)) if trans else (4 * i + k // 2, 16 * (k % 2)) for k in range(8)]
        for i in range(8)
    ]

    @instruction(
        f"(shared[i32], u32[{count}][i32]) -> void",
        f"stmatrix.sync.aligned.m8n8.x{count}{dot_trans}.shared.b16 [{{y}}], {{values}};",
        section="9.7.14.5.16",
        convergent=True,
        name=name,
    )
    def store(y, index, values, values_index):
        """Store one to four matrices."""
        lane = current().lane
        at = y.first(index, 16 // y.itemsize) * y.itemsize if lane < 8 * count else None
        lanes = exchange(name, [int(values[values_index + m]) for m in range(count)], 0xFFFFFFFF)
        if at is None:
            return
        m, line = divmod(lane, 8)
        ROW.pack_into(y.bytes, at, *[lanes[source][m] >> shift & 0xFFFF for source, shift in places[line]])

    return store
