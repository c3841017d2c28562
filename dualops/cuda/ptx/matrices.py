"""Load (from sm_80) and store (sm_90) 8 x 8 matrices of 16-bit elements: from and to shared memory, to and from a
warp's registers in the layout of products.
"""

from __future__ import annotations

from struct import Struct

from ..simulator import current, exchange
from .asm import family, instruction

ROW = Struct("8H")  # a row of a matrix


@family(count=(1, 2, 4), trans=(False, True))
def ldmatrix(count, trans=False):
    """Load `count` matrices, one register per lane each.

    Lane 8 * m + r passes the address of row r of matrix m: 16 bytes at a multiple of 16. The addresses of other lanes
    are ignored. Lane l gets elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l // 4, the first in the lower half of the
    word. trans: those of column l // 4. An element of 32 bits counts as two, and can't be transposed.
    """
    name = f"ldmatrix_x{count}_trans" if trans else f"ldmatrix_x{count}"
    dot_trans = ".trans" if trans else ""

    @instruction(
        f"(=u32[{count}][i32], shared[i32]) -> void",
        f"ldmatrix.sync.aligned.m8n8.x{count}{dot_trans}.shared.b16 {{to}}, [{{x}}];",
        section="9.7.14.5.15",
        convergent=True,
        name=name,
    )
    def load(to, to_index, x, index):
        """Load one to four matrices."""
        lane = current().lane
        mine = ROW.unpack_from(x.bytes, x.first(index, 16 // x.itemsize) * x.itemsize) if lane < 8 * count else None
        rows = exchange(name, mine, 0xFFFFFFFF)
        line, first = lane // 4, 2 * (lane % 4)
        for m in range(count):
            if trans:
                low, high = rows[8 * m + first][line], rows[8 * m + first + 1][line]
            else:
                low, high = rows[8 * m + line][first : first + 2]
            to[to_index + m] = high << 16 | low

    return load


@family(count=(1, 2, 4), trans=(False, True))
def stmatrix(count, trans=False):
    """Store `count` matrices, one register per lane each: the inverse of `ldmatrix`, with the same addresses."""
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
