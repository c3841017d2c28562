"""Which query and which key each score of a tile in registers belongs to; and the mark of hidden products.

Rows are queries and columns keys, or, transposed, rows are keys and columns queries. A thread has rows r and r + 8, and
in each of them two neighbours of every eight columns (`tile.fragment`).

The mark is a NaN that no arithmetic produces. -inf cannot mark a product: one may be -inf without a mask, and an option
such as softcap makes a finite score of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...spec.attention import At
from ..compiler.backend import Namespace, cuda, f32, i32, i64, u32, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits, max_nan_f32 as max_or_nan, min_nan_f32 as min_or_nan
from ..tile.products import opaque_i32
from ..tile.softmax_rows import LANES
from ..tile.warpgroup import ROWS
from .options import OptionChain


@verb
def my_row():
    """Return the first row of this thread in its warpgroup."""
    tid = u32(cuda.threadIdx.x)  # unsigned: shorter code for % and //
    return i32(tid % u32(128) // u32(32) * u32(16) + tid % u32(32) // u32(LANES))


@verb
def my_column():
    """Return the first column of this thread among those of each quad of lanes."""
    return i32(u32(2) * (u32(cuda.threadIdx.x) % u32(LANES)))


class Places(Namespace):
    """The verbs. where: the tile's; its first row is the first row of the thread's warpgroup (or warp)."""

    # (where) -> my first column, which is even; 64 bits, so that an added constant becomes part of an address
    first: Callable[..., Any]
    ahead: Callable[..., Any]  # (where, row, first) -> how far the query is ahead of the key
    inside: Callable[..., Any]  # (where) -> whether the tile ends before the last query and key
    steady: bool  # whether 8 rows further are 8 positions further: false if rows are heads of the same query
    # (where, row, first, e, distance, down=0) -> At of column `first + e`. distance: what `ahead` returned for `first`
    # and the row `down` rows before, if rows are `steady`: then equal distances are computed once
    at_inside: Callable[..., At]  # for tiles that are `inside`
    # for all tiles; pairs beyond the end get the last query or key, so that options can read arrays
    at: Callable[..., At]
    seen: Callable[..., Any]  # (options, where, row) -> first and end of the columns that ranges show to a row
    there: Callable[..., Any]  # (where, row) -> whether a row exists; one beyond the end may be another sequence's
    passes: Callable[..., Any]  # (where) -> whether the tile has rows beyond the end
    origin: Callable[..., Any]  # (where) -> the tile's first column
    within: Callable[..., Any]  # (options, where) -> whether ranges show all of the tile


def places_of_queries(chain: OptionChain, columns: int, heads: int) -> Places:
    """Return the coordinates of scores in tiles [queries, keys]. heads: rows of each query, if heads are adjacent."""

    @verb
    def first(where):
        return i64(opaque_i32(i32(where.n0 + my_column())))

    @verb
    def ahead(where, row, key):
        return f32(i32(where.m0 + row // heads + where.offset - key))

    @verb
    def inside(where):
        return (where.m0 + (ROWS + heads - 1) // heads <= where.Sq) & (where.n0 + columns <= where.Sk)

    @verb
    def at_inside(where, row, key, e, distance, down=0):
        i, distance = i32(where.m0 + row // heads), distance - f32(e - down)
        return At(where.b, i32(where.h + row % heads), i, key + e, i32(i + where.offset), distance, e & 1)

    @verb
    def at(where, row, key, e, distance, down=0):
        i, j = min(i32(where.m0 + row // heads), i32(where.Sq - 1)), min(i32(key + e), i32(where.Sk - 1))
        return At(where.b, i32(where.h + row % heads), i, j, i32(i + where.offset), distance - f32(e - down), j & 1)

    @verb
    def seen(options, where, row):
        i = i32(where.m0 + row // heads)
        return chain.keys(options, i, i32(i + where.offset), where.Sk)

    @verb
    def there(where, row):
        return where.m0 + row // heads < where.Sq

    @verb
    def passes(where):
        return where.m0 + (ROWS + heads - 1) // heads > where.Sq

    @verb
    def origin(where):
        return where.n0

    @verb
    def within(options, where):
        m1, n1 = min(where.m0 + ROWS // heads, where.Sq), where.n0 + columns  # rows beyond the last query do not count
        return chain.within(options, where.m0, m1, where.n0, n1, where.offset, where.Sq, where.Sk)

    return Places.from_locals(locals(), steady=heads == 1)


def places_of_keys(chain: OptionChain, columns: int) -> Places:
    """Return the coordinates of scores in tiles [keys, queries]."""

    @verb
    def first(where):
        return i64(opaque_i32(i32(where.m0 + my_column())))

    @verb
    def ahead(where, row, query):
        return f32(i32(query + where.offset - where.n0 - row))

    @verb
    def inside(where):
        return (where.m0 + columns <= where.Sq) & (where.n0 + ROWS <= where.Sk)

    @verb
    def at_inside(where, row, query, e, distance, down=0):
        i, j = i32(query + e), i32(where.n0 + row)
        return At(where.b, where.h, i, j, i32(i + where.offset), distance + f32(e - down), j & 1)

    @verb
    def at(where, row, query, e, distance, down=0):
        i, j = min(i32(query + e), i32(where.Sq - 1)), min(i32(where.n0 + row), i32(where.Sk - 1))
        return At(where.b, where.h, i, j, i32(i + where.offset), distance + f32(e - down), j & 1)

    @verb
    def seen(options, where, row):
        j = i32(where.n0 + row)
        return chain.queries(options, j, i32(j - where.offset), where.Sq)

    @verb
    def there(where, row):
        return where.n0 + row < where.Sk

    @verb
    def passes(where):
        return where.n0 + ROWS > where.Sk

    @verb
    def origin(where):
        return where.m0

    @verb
    def within(options, where):
        m1, n1 = where.m0 + columns, min(where.n0 + ROWS, where.Sk)  # rows beyond the last key do not count
        return chain.within(options, where.m0, m1, where.n0, n1, where.offset, where.Sq, where.Sk)

    return Places.from_locals(locals(), steady=True)


__all__ = ["is_marked", "mark", "max_or_nan", "min_or_nan"]

MARK = u32(0x7FC0D0A1)  # tensor cores' own NaN is 0x7FFFFFFF


@verb
def mark():
    """Return the NaN that marks a hidden product or score."""
    return f32_of_bits(MARK)


@verb
def is_marked(x):
    """Return whether x is the NaN of `mark`."""
    return bits_of_f32(x) == MARK
