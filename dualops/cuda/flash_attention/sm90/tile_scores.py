"""The scores of a tile: what options read before there are any, and how products become scores.

Rows are queries (forward, dq). Options are asked a tile ahead, so that what they read has arrived:

    pending = scores_of.ask(own, at, tile)                 options begin to read: padding masks, a bias in memory
    known = scores_of.know(own, at, pending)               what masks show, as far as that needs no scores
    scores_of.mask(own, scores, known, i)                  products become scores; -inf where a mask hides one
    scores_of.pack(own, probs, scores, known)              probabilities become a left factor, 0 where dropout says so

Rows are keys (dk and dv). What needs no scores is computed while products run:

    known = scores_of.know(own, where, tile)
    given = scores_of.mask(own, scores, known, stage)      `Given`, for probabilities

Of tiles in a block mask's list, mask_mod is evaluated before there are scores, while registers are free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Members, i32, noun, u32, verb
from ...tile.softmax_rows import SoftmaxRows
from ..fragment_scores import FragmentScores
from ..score_mod import Given
from ..tiles import Where
from .loads import KvLoads, QLoads


class Own(NamedTuple):
    """What all tiles of a thread have in common."""

    smem: Any
    bias_bars: Any
    words: Any  # of the bias, or of what options read ahead
    options: Any
    scale: Any
    seed: Any  # of dropout
    warpgroup: Any


class OwnRows(NamedTuple):
    """A warpgroup's queries of a work item."""

    task: Any
    m: Any  # the first


class Pending(NamedTuple):
    """A tile of keys whose options were asked."""

    tile: Any  # `KvTile`
    asked: Any  # which keys are padding; it may still be in flight


class Known(NamedTuple):
    """A tile of keys, and what masks show of it."""

    where: Any
    picks: Any  # a bit for each score, of tiles in a list
    seen: Any  # keys that are no padding
    before: Any  # `KvTile`: the next tile


@noun
def scores_of_queries(score: FragmentScores, load: KvLoads, rows: SoftmaxRows) -> Members:
    """The verbs of tiles [64, keys] of a warpgroup. at: `OwnRows`."""
    visits, bias = load.visits, load.bias
    LISTED, FETCHES = visits.listed, score.fetches and bias.word is None
    words = score.held if FETCHES else bias.words

    @verb
    def own(smem, bias_bars, work, warpgroup):
        """Return `Own`; once in a kernel."""
        return Own(smem, bias_bars, words(), work.options, work.scale, score.seed(work.options), warpgroup)

    @verb
    def _where(at, n0):
        task = at.task
        return Where(task.b, task.h, at.m, n0, task.Sq, task.Sk, task.offset)

    @verb
    def ask(own, at, tile):
        """Return `Pending`. If there is no such tile, options read of some valid keys, or nothing."""
        where, asked = _where(at, max(tile.n0, i32(0))), i32(0)
        if at.task.count != u32(0):
            asked = score.ask(own.options, where)
            if FETCHES:
                score.fetch(own.words, own.options, where)
        return Pending(tile, asked)

    @verb
    def know(own, at, pending):
        """Return `Known`."""
        where, picks = _where(at, pending.tile.n0), i32(0)
        if LISTED:
            picks = score.picks(own.options, where, pending.tile.full)
        return Known(where, picks, score.sees(pending.asked), visits.before(pending.tile, at.task, own.options))

    @verb
    def hold(own, filling):
        """Return the first argument of the score's `word`, for `finish`; until `release`."""
        return bias.wait(own.smem, own.bias_bars, own.words, filling, own.warpgroup)

    @verb
    def release(own, filling):
        bias.release(own.bias_bars, filling, own.warpgroup)

    @verb
    def finish(own, scores, known, held):
        """Turn products into scores, -inf where a mask hides one."""
        if LISTED:
            score.finish_picked(scores, held, own.options, own.scale, known.where, known.picks)
        else:
            score.finish_held(scores, held, own.options, own.scale, known.where, known.seen)

    @verb
    def mask(own, scores, known, filling):
        """Do what `finish` does, with the bias of this filling."""
        finish(own, scores, known, hold(own, filling))
        release(own, filling)

    @verb
    def pack(own, probs, scores, known):
        """Pack probabilities as a left factor, without those that dropout drops."""
        rows.pack(probs, scores)
        score.drop(probs, own.options, known.where, own.seed)

    return locals()


class OwnOfKeys(NamedTuple):
    """What all tiles of a thread have in common."""

    smem: Any
    words: Any  # of the bias
    options: Any
    factors: Any  # as in `Given`
    seed: Any  # of dropout


class KnownOfKeys(NamedTuple):
    """A tile of queries, and what masks and dropout show of it."""

    where: Any
    kept: Any  # probabilities that dropout keeps
    picks: Any  # a bit for each score, of tiles in a list
    seen: Any  # keys that are no padding


@noun
def scores_of_keys(score: FragmentScores, load: QLoads, *, keeps: bool = True) -> Members:
    """The verbs of tiles [64 keys, queries] of a warpgroup. keeps: dropout's bits are computed in `know`."""
    bias, LISTED, KEEPS = load.bias, load.visits.listed, keeps

    @verb
    def own(smem, work):
        """Return `OwnOfKeys`; once in a kernel."""
        factors = work.scale, score.units(work.scale)[0]
        return OwnOfKeys(smem, bias.words(), work.options, factors, score.seed(work.options))

    @verb
    def know(own, where, tile):
        """Return `KnownOfKeys`. tile: `QTile`, if tiles are listed."""
        kept, picks = u32(0), i32(0)
        if KEEPS:
            kept = score.keeps(own.options, where, own.seed)
        seen = score.sees(score.ask(own.options, where))
        if LISTED:
            picks = score.picks(own.options, where, tile.full)
        return KnownOfKeys(where, kept, picks, seen)

    @verb
    def mask(own, scores, known, bias_stage):
        """Turn products into scores; hidden ones are marked, or -inf. Return `Given`."""
        held = bias.held(own.smem, bias_stage, own.words)
        if LISTED:
            score.finish_picked(scores, held, own.options, own.factors[0], known.where, known.picks)
        else:
            score.finish_held(scores, held, own.options, own.factors[0], known.where, known.seen)
        return Given(own.options, own.factors, known.where, held)

    return locals()
