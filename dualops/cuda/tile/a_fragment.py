"""Load a warpgroup's 64 rows of a 16-bit tile from shared memory to registers, 16 columns at a time.

    own = words_of_rows(tile)                      the rows are lines of the tile
    own = words_of_columns(tile)                   the rows are columns of the tile
    first = own.first(x_at, cuda.threadIdx.x)
    own.load(words, at, smem, first, step)         a thread's four words to words[at:]

Words have the layout of a product's left factor (`fragment.left_16bit`). Each word has two neighbours of a row: rows r
and r + 8 of the first 8 columns, then of the other 8. A product's accumulators have the same layout: over all steps,
word 2 * j + h has row r + 8 * h, and the thread's two of the columns from 8 * j on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Namespace, i32, u32, verb
from ..ptx.matrices import ldmatrix
from .swizzle import Operand
from .warpgroup import ROWS, my_warpgroup

WORDS = 4  # per thread and step: one for each matrix of 8 x 8
COLUMNS = 16  # per step
CHUNK = 16  # bytes of a matrix's row


class AFragment(Namespace):
    """The verbs that load a thread's words."""

    steps: int  # each has 16 columns
    first: Callable[..., Any]  # (x_at, tid) -> where a thread begins to read, in a tile at byte x_at
    load: Callable[..., None]  # (words, at, smem, first, step): four words to words[at:]


@cache
def words_of_rows(x: Operand) -> AFragment:
    """Return the verbs for the 64 lines from byte x_at on of a tile in boxes. Each step reads 32 bytes of a line."""
    load_four, SPAN, BOX, IN_BOX = ldmatrix(WORDS), x.span, x.box, x.span // (2 * CHUNK)

    @verb
    def first(x_at, tid):
        lane, warp = u32(tid) % u32(32), u32(tid) % u32(128) // u32(32)
        plain = (warp * u32(16) + lane % u32(16)) * u32(SPAN) + lane // u32(16) * u32(CHUNK)
        return i32(u32(x_at) + (plain ^ (plain >> u32(3) & u32(SPAN - CHUNK))))  # see `swizzle`

    @verb
    def load(words, at, smem, first, step):
        load_four(words, at, smem, i32((first ^ 2 * CHUNK * (step % IN_BOX)) + step // IN_BOX * BOX))

    return AFragment(steps=x.width // COLUMNS, first=first, load=load)


@cache
def words_of_columns(x: Operand, *, same_columns: bool = False) -> AFragment:
    """Return the verbs for 64 columns of each warpgroup, one box of 128 bytes, of a tile whose lines are columns.

    same_columns: all warpgroups read the first 64 columns from x_at on.
    """
    load_four, SPAN, box = ldmatrix(WORDS, True), x.span, 0 if same_columns else x.box
    if SPAN != 2 * ROWS:
        raise ValueError(f"boxes of {SPAN} bytes, expected {2 * ROWS}")

    @verb
    def first(x_at, tid):
        tid = i32(u32(tid) % u32(128))
        warp, lane = i32(tid // 32), i32(tid % 32)
        line, byte = i32(lane // 16 * 8 + lane % 8), i32(32 * warp + lane // 8 % 2 * 16)
        return i32(x_at + my_warpgroup() * box + line * SPAN + (byte ^ (lane % 8) << 4))

    @verb
    def load(words, at, smem, first, step):
        load_four(words, at, smem, i32(first + step * 16 * SPAN))

    return AFragment(steps=x.lines // COLUMNS, first=first, load=load)
