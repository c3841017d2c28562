"""Which tiles of queries a block of keys visits, from the first to the last, one head of the group after the other: all
of a range, or those that a block mask lists by tiles of keys (`..block_mask_transpose`), of TILE queries each, as one
or more tiles of BLOCK_Q.

Who loads and who multiplies read the list for themselves: a block's tile number i is a part of entry i // PARTS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....spec.attention.blocks import TILE, tiles_of
from ...compiler.backend import Namespace, i32, i64, u32, verb
from ..arguments import Variant
from ..fragment_scores import FragmentScores
from ..tile_scheduler import tile_after
from .config import BLOCK_MASK


class QTiles(Namespace):
    """The verbs. group: heads that share the keys."""

    count: Callable[..., Any]  # (task, group, options) -> tiles of all heads
    # (task, group, options) -> head, first query, and 1 where the list says that mask_mod lets all pairs through; where
    # there is no tile, numbers that nobody may use
    first: Callable[..., Any]
    after: Callable[..., Any]  # (h, m0, i, end, task, group, options) -> the same after that tile, number i of `end`
    picks: Callable[..., Any]  # (options, where, full) -> what `finish` must know before there are scores
    finish: Callable[..., None]  # (scores, options, scale, where, picks)
    finish_held: Callable[..., None]  # (scores, held, options, scale, where, seen, picks): of what `score.sees` said


def q_tiles_of(block_q: int, variant: Variant, score: FragmentScores) -> QTiles:
    """The verbs of a kernel."""
    names = [option.name for option, _ in variant.having.variants]
    return _of_list(block_q, score, names) if BLOCK_MASK in names else _of_range(block_q, score)


def _of_range(block_q: int, score: FragmentScores) -> QTiles:
    BLOCK_Q = block_q

    @verb
    def count(task, group, options):
        return u32(u32(group) * (u32(task.end - task.first + (BLOCK_Q - 1)) // u32(BLOCK_Q)))

    @verb
    def first(task, group, options):
        return i32(task.h_kv * group), i32(task.first), i32(0)

    @verb
    def after(h, m0, i, end, task, group, options):
        h, m0 = tile_after(task, h, m0, BLOCK_Q)
        return h, m0, i32(0)

    @verb
    def picks(options, where, full):
        return i32(0)

    @verb
    def finish(scores, options, scale, where, picks):
        score.finish(scores, options, scale, where)

    @verb
    def finish_held(scores, held, options, scale, where, seen, picks):
        score.finish_held(scores, held, options, scale, where, seen)

    return QTiles.from_locals(locals())


def _of_list(block_q: int, score: FragmentScores, names: list[str]) -> QTiles:
    BLOCK_Q, PARTS, INDEX = block_q, TILE // block_q, names.index(BLOCK_MASK)
    if TILE % block_q:
        raise ValueError(f"tiles of {block_q} queries do not divide a block mask's, of {TILE}")
    tells_all = "key_padding_mask" not in names

    @verb
    def row(task, options):
        """Where the list of the tile of keys begins: with its length."""
        steps = options[INDEX].lists.strides
        return i64(task.b) * steps[0] + i64(task.h_kv) * steps[1] + i64(task.n0 // TILE) * steps[2]

    @verb
    def count(task, group, options):
        return u32(options[INDEX].lists.data[row(task, options)] * PARTS)

    @verb
    def at(i, task, group, options):
        entry = u32(options[INDEX].lists.data[row(task, options) + 1 + i64(i // u32(PARTS))])
        number, q_tiles = u32(entry // u32(2)), u32(tiles_of(task.Sq))
        g = u32(number // q_tiles)
        m0 = i32(u32(number - u32(g * q_tiles)) * u32(TILE) + i % u32(PARTS) * u32(BLOCK_Q))
        return i32(task.h_kv * group + i32(g)), m0, i32(entry % u32(2)) if tells_all else i32(0)

    @verb
    def first(task, group, options):
        return at(u32(0), task, group, options)

    @verb
    def after(h, m0, i, end, task, group, options):
        return at(min(u32(i + u32(1)), u32(end - u32(1))), task, group, options)

    @verb
    def picks(options, where, full):
        return score.picks(options, where, full)

    @verb
    def finish(scores, options, scale, where, picks):
        score.finish_picked(scores, picks, options, scale, where, picks)

    @verb
    def finish_held(scores, held, options, scale, where, seen, picks):
        score.finish_picked(scores, held, options, scale, where, picks)

    return QTiles.from_locals(locals())
