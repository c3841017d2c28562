"""How keys are split where queries are few: by their number alone, so that no row knows of its batch.

A split has LEAST_TILES tiles of keys, or as many as make no more than MOST_SPLITS of all of them. Splits are counted
from key 0 on, masked or not. Somewhat more keys than MOST_SPLITS splits of LEAST_TILES have make fewer splits: the
longest sequence of a call need not have the most of them. What a split finds of a row, o and lse, is float32 and added
up in their order (`split_kv_sums`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...compiler.backend import Members, Noun, i32, i64, noun, verb
from ...launch.views import strided

LEAST_TILES = 4
MOST_SPLITS = 64  # two for each lane that merges
PARTS_TYPE = strided("float32", 4)  # what splits find: along split, batch, head and token


Splits = Noun  # what `splits_of` makes


def most_splits(keys: Any, block_kv: int) -> Any:
    """How many splits so many keys make at most, or fewer, which may make more of them."""
    each = LEAST_TILES * block_kv
    return min((keys + (each - 1)) // each, MOST_SPLITS)


@cache
@noun
def splits_of(block_kv: int) -> Members:
    """The verbs of a number of keys, for a kernel's tiles."""
    MOST, LEAST = block_kv * MOST_SPLITS, block_kv * LEAST_TILES

    @verb
    def tiles(keys):
        """Return the number of tiles of a split."""
        return max(i32(LEAST_TILES), i32((keys + (MOST - 1)) // MOST))

    @verb
    def count(keys):
        """Return the number of splits."""
        each = i32(tiles(keys) * block_kv)
        return i32((keys + (each - 1)) // each)

    @verb
    def most(keys):
        """Return the greatest number of splits of as many keys or fewer."""
        return min(i32((keys + (LEAST - 1)) // LEAST), i32(MOST_SPLITS))

    return locals()


@verb
def part_start(x, split, b, h, token):
    """Where what a split finds of a row begins."""
    return i64(split) * x.strides[0] + i64(b) * x.strides[1] + i64(h) * x.strides[2] + i64(token) * x.strides[3]
