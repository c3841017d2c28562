"""Which tiles of keys a piece of work visits, from the last to the first: all of a range, or those that a block mask
lists (`spec/attention/blocks.py`), of TILE keys each, as one or more tiles of BLOCK_KV.

A tile of a range is its number, one of a list its place in the list: `task.first` and `task.count` say which are the
piece's own. Producer and consumers read the list for themselves; entries come long before the consumers ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....spec.attention.blocks import TILE
from ...compiler.backend import Namespace, i32, i64, verb
from ..arguments import Variant
from ..fragment_scores import FragmentScores
from ..tile_scheduler import place_in_list, range_of
from .config import BLOCK_MASK


class Visit(NamedTuple):
    """A tile of keys."""

    n0: Any  # its first key
    seen: Any  # 1 where the list says that mask_mod lets all pairs of the tile through
    place: Any  # in the list


class KvTiles(Namespace):
    """The verbs."""

    between: Callable[..., Any]  # (b, h, m0, n_first, n_end, options) -> first and count: tiles with some of these keys
    last: Callable[..., Visit]  # (task, options): where there is none, a Visit that nobody may use
    before: Callable[..., Visit]  # (visit, task, options): before the first, the same
    picks: Callable[..., Any]  # (options, where, visit) -> what `finish` must know before there are scores
    finish: Callable[..., None]  # (scores, held, options, scale, where, picks, seen): of the score tile
    keys: Callable[..., Any]  # (task) -> first and end of keys, those of all tiles among them


def kv_tiles_of(
    block_q: int, block_kv: int, variant: Variant, score: FragmentScores, *, split: bool = False
) -> KvTiles:
    """The verbs of a kernel. Where keys are split, block masks are not looked at."""
    names = [option.name for option, _ in variant.having.variants]
    listed = BLOCK_MASK in names and not split
    return _of_list(block_q, block_kv, score, names) if listed else _of_range(block_kv, score)


def _of_range(block_kv: int, score: FragmentScores) -> KvTiles:
    BLOCK_KV, tiles = block_kv, range_of(block_kv)

    @verb
    def last(task, options):
        return Visit(i32((task.first + i32(task.count)) * BLOCK_KV - BLOCK_KV), i32(0), i32(0))

    @verb
    def before(visit, task, options):
        return Visit(i32(visit.n0 - BLOCK_KV), i32(0), i32(0))

    @verb
    def picks(options, where, visit):
        return i32(0)

    @verb
    def finish(scores, held, options, scale, where, picks, seen):
        score.finish_held(scores, held, options, scale, where, seen)

    return KvTiles.from_locals(locals(), between=tiles.between, keys=tiles.keys)


def _of_list(block_q: int, block_kv: int, score: FragmentScores, names: list[str]) -> KvTiles:
    BLOCK_KV, PARTS, INDEX = block_kv, TILE // block_kv, names.index(BLOCK_MASK)
    if TILE % block_kv or TILE % block_q:
        told = f"{block_q} queries by {block_kv} keys"
        raise ValueError(f"tiles of {told} do not divide a block mask's, {TILE} queries by {TILE} keys")
    has_ranges, tells_all = "band" in names, "key_padding_mask" not in names

    @verb
    def row(b, h, m0, options):
        """Where the list of a tile of queries begins: with its length."""
        steps = options[INDEX].lists.strides
        return i64(b) * steps[0] + i64(h) * steps[1] + i64(m0 // TILE) * steps[2]

    @verb
    def between(b, h, m0, n_first, n_end, options):
        start, entries = row(b, h, m0, options), options[INDEX].lists.data
        first, end = i32(0), i32(entries[start])
        if has_ranges:
            end = place_in_list(entries, start, end, i32((n_end + (TILE - 1)) // TILE))
            first = min(place_in_list(entries, start, end, i32(n_first // TILE)), end)
        return i32(first * PARTS), i32((end - first) * PARTS)

    @verb
    def at(place, task, options):
        """The number before the list, its length, is there to be read too."""
        start = row(task.b, task.h, task.m0, options)
        entry = i32(options[INDEX].lists.data[start + 1 + (place // PARTS)])
        n0 = i32(entry // 2 * TILE + place % PARTS * BLOCK_KV)
        return Visit(n0, i32(entry % 2) if tells_all else i32(0), place)

    @verb
    def picks(options, where, visit):
        return score.picks(options, where, visit.seen)

    @verb
    def finish(scores, held, options, scale, where, picks, seen):
        score.finish_picked(scores, held, options, scale, where, picks)

    @verb
    def last(task, options):
        return at(i32(task.first + i32(task.count) - 1), task, options)

    @verb
    def before(visit, task, options):
        return at(i32(visit.place - 1), task, options)

    @verb
    def keys(task):
        return i32(0), task.Sk

    return KvTiles.from_locals(locals())
