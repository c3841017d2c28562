"""Tiles of sequences that lie one after another, numbered so that few numbers are nobody's.

Those of sequence b begin at number ends[b] // block + b. It has no more tiles than lie between that and the next one's
first, so total // block + B numbers are enough, however long the longest sequence is. Whose a number is, is found by
halving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compiler.backend import Members, i32, noun, u32, verb
from ..launch.views import boundary

# heads of keys that blocks share at a time: few, so that what they read and add stays in L2, but so many that a head's
# keys are not all under way at once, each a tile behind the one before
LEAST_HEADS, MOST_HEADS = 2, 16


def packed_count(total: Any, block: int, B: Any) -> Any:
    """Numbers of tiles of so many tokens in B sequences."""
    return total // block + B


@noun
def packed_tiles(block: int) -> Members:
    """The verbs of tiles of so many tokens.

    ends [B + 1]: cu_seqlens of one side, of ranges of keys their cumulative lengths.
    """

    @verb
    def after(tokens, b):
        """Return the number of sequence b's first tile, from the number of tokens before it."""
        return i32(u32(tokens) // u32(block) + u32(b))

    @verb
    def first(ends, b):
        """Return the number of sequence b's first tile."""
        return after(boundary(ends, b), b)

    @verb
    def sequence(ends, B, number):
        """Return the sequence that has the tile with this number."""
        low, high = i32(0), i32(B - 1)
        while low < high:
            middle = i32((low + high + 1) // 2)
            if first(ends, middle) <= number:
                low = middle
            else:
                high = i32(middle - 1)
        return low

    return locals()


def packed_pieces(block: int, side: int) -> Callable[..., Any]:
    """The verb (number, extent, each, lengths) -> heads of a batch, head, counted through all batches, its tile of that
    number, and how many numbers its tiles have. Numbers behind the last sequence's, of tokens that belong to none, are
    tiles behind its last token.

    side: 0 for tiles of queries, 1 for those of keys. each: heads for each head of keys. extent.section: queries that
    L2 has room for; of each sequence so many heads follow one another, tile by tile, as have these.
    """
    tiles = packed_tiles(block)

    @verb
    def piece(number, extent, each, lengths):
        ends, ends_q, heads = lengths[side], lengths[0], u32(u32(extent.H) // u32(extent.group) * u32(each))
        b = tiles.sequence(ends, i32(u32(extent.heads) // u32(extent.H)), i32(u32(number) // heads))
        first = u32(tiles.first(ends, b))
        count = u32(u32(tiles.first(ends, i32(b + 1))) - first)
        Sq = max(i32(boundary(ends_q, b + 1) - boundary(ends_q, b)), i32(1))
        room = min(max(u32(extent.section) // u32(Sq), u32(LEAST_HEADS)), u32(MOST_HEADS))
        section, place = min(u32(room * u32(each)), heads), u32(u32(number) - u32(first * heads))
        nobodys = place >= u32(heads * count)
        if nobodys:
            place = u32(0)
        before = u32(place // u32(section * count) * section)  # heads of earlier sections
        place, here = u32(place - u32(before * count)), min(u32(heads - before), section)
        head, tile = u32(u32(b) * heads + u32(before + place % here)), u32(place // here)
        # the same tile from the front and from the back
        return heads, head, count if nobodys else tile, u32(u32(2) * count + u32(1)) if nobodys else count

    return piece
