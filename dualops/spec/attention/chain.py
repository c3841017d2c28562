"""Compose all options of a problem into one chain of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from .option import LEFT, RIGHT, UNBOUNDED, At, Curve, OptionVariant, Parts, Verbs


class Chain(NamedTuple):
    """All options of a problem, composed. `args` is the tuple of their arguments, in order.

    Queries m0 to m1 and keys n0 to n1 (ends excluded) are a nonempty tile; `offset` is the position of query 0.
    """

    score: Callable[..., Any]  # (score, args, at) -> score
    fetch: Callable[..., Any] | None  # (args, at) -> a word, as in Parts
    score_fetched: Callable[..., Any] | None  # (score, args, at, word, odd) -> score, with the fetched word
    slope: Callable[..., Any]  # (score, args, at) -> d score(score) / d score
    curve: Curve | None  # with arguments of all options; only if one option alone changes scores, by a curve
    keys: Callable[..., Any]  # (args, i, opposite, Sk) -> first, end: within 0 and Sk
    queries: Callable[..., Any]  # (args, j, opposite, Sq) -> first, end: within 0 and Sq
    pick: Callable[..., Any]  # (args, at) -> bool: whether a pair within these ranges is visible
    seed: Callable[..., Any]  # (args) -> a word, as in Parts
    keeps: Callable[..., Any]  # (args, at, seed, below, right) -> four words, as in Parts
    growth: Callable[..., Any]  # (args) -> number
    weights: Callable[..., Any]  # (args, at) -> two tuples of four numbers, for eight probabilities
    sink: Callable[..., Any]  # (args, h) -> number; -inf without a sink
    visible: Callable[..., Any]  # (args, at) -> bool: by ranges and picks
    weight: Callable[..., Any]  # (args, at) -> number: the one of eight for this score
    key_range: Callable[..., Any]  # (args, m0, m1, offset, Sk) -> first, end: keys that some of these queries may see
    query_range: Callable[..., Any]  # (args, n0, n1, offset, Sq) -> first, end: queries that may see some of these keys
    full: Callable[..., Any]  # (args, m0, m1, n0, n1, offset, Sq, Sk) -> bool: whether all exist and see all
    within: Callable[..., Any]  # as `full`, by ranges only, without picks
    scores: bool  # some option changes scores
    fetches: bool  # ... with data that can be fetched before
    bends: bool  # ... with a slope that may differ from 1
    picks: bool  # some mask picks pairs
    picks_keys: bool  # all masks that pick pairs look at batch and key only
    weighs: bool  # probabilities have a weight
    sinks: bool  # rows have a sink
    reads: bool  # scores read an array at their places


def compose(having: Sequence[OptionVariant], verbs: Verbs) -> Chain:
    """Compose the chain of a problem's options, with functions for the platform of `verbs`."""
    parts = [option.make(verbs, facts) for option, facts in having]
    joined = _nothing(verbs)
    for index, own in enumerate(parts):
        joined = _joined(joined, own, index, verbs)

    def some(name: str) -> bool:
        return any(getattr(own, name) is not None for own in parts)

    picks, weighs, weights = some("pick"), some("keeps"), _weights(joined, verbs)
    apart = "fetch", "fetched", "picks_keys", "curve"
    known = {name: part for name, part in joined._asdict().items() if name not in apart}
    return Chain(
        **known,
        visible=_visible(joined, verbs),
        weights=weights,
        weight=_weight(weights, verbs, weighs),
        **_of_tiles(joined, verbs, picks),
        curve=_curve(parts, verbs),
        scores=some("score"),
        **_fetched(parts, verbs),
        bends=some("slope"),
        picks=picks,
        picks_keys=picks and all(own.picks_keys for own in parts if own.pick is not None),
        weighs=weighs,
        sinks=some("sink"),
    )


def _nothing(verbs: Verbs) -> Parts:
    """Return the functions without any option. Like `_joined` and all below, they take the arguments of all options."""
    ONE, NOTHING, integer = verbs.number(1), verbs.number(-inf), verbs.integer
    NO_SEED, ALL = verbs.word(0), verbs.low(LEFT | RIGHT)

    @verbs.verb
    def score(score, args, at):
        return score

    @verbs.verb
    def slope(score, args, at):
        return ONE

    @verbs.verb
    def within(args, own, opposite, count):
        return integer(0), integer(count)

    @verbs.verb
    def pick(args, at):
        return True

    @verbs.verb
    def seed(args):
        return NO_SEED

    @verbs.verb
    def keeps(args, at, seed, below, right):
        return ALL, ALL, ALL, ALL

    @verbs.verb
    def growth(args):
        return ONE

    @verbs.verb
    def sink(args, h):
        return NOTHING

    return Parts(score, slope, within, within, pick, seed=seed, keeps=keeps, growth=growth, sink=sink)


def _joined(earlier: Parts, own: Parts, INDEX: int, verbs: Verbs) -> Parts:
    """Add one more option, whose arguments have the number INDEX."""
    joined = earlier._replace(reads=earlier.reads or own.reads)
    if own.score is not None:

        @verbs.verb
        def score(score, args, at):
            return own.score(earlier.score(score, args, at), args[INDEX], at)

        joined = joined._replace(score=score)
    if own.slope is not None:

        @verbs.verb
        def slope(score, args, at):
            return earlier.slope(score, args, at) * own.slope(earlier.score(score, args, at), args[INDEX], at)

        joined = joined._replace(slope=slope)
    if own.keys is not None:
        joined = joined._replace(keys=_overlap(earlier.keys, own.keys, INDEX, verbs))
    if own.queries is not None:
        joined = joined._replace(queries=_overlap(earlier.queries, own.queries, INDEX, verbs))
    if own.pick is not None:

        @verbs.verb
        def pick(args, at):
            return earlier.pick(args, at) & own.pick(args[INDEX], at)

        joined = joined._replace(pick=pick)
    if own.keeps is not None:

        @verbs.verb
        def seed(args):
            return own.seed(args[INDEX])

        @verbs.verb
        def keeps(args, at, seed, below, right):
            return own.keeps(args[INDEX], at, seed, below, right)

        @verbs.verb
        def growth(args):
            return earlier.growth(args) * own.growth(args[INDEX])

        joined = joined._replace(seed=seed, keeps=keeps, growth=growth)
    if own.sink is not None:

        @verbs.verb
        def sink(args, h):
            return own.sink(args[INDEX], h)

        joined = joined._replace(sink=sink)
    return joined


def _fetched(parts: Sequence[Parts], verbs: Verbs) -> dict[str, Any]:
    """Return the score functions if one option fetches."""

    @verbs.verb
    def score(score, args, at, word, odd):
        return score

    def then_fetched(earlier: Callable[..., Any], own: Callable[..., Any], INDEX: int) -> Callable[..., Any]:
        @verbs.verb
        def score(score, args, at, word, odd):
            return own(earlier(score, args, at, word, odd), args[INDEX], word, odd)

        return score

    def then(earlier: Callable[..., Any], own: Callable[..., Any], INDEX: int) -> Callable[..., Any]:
        @verbs.verb
        def score(score, args, at, word, odd):
            return own(earlier(score, args, at, word, odd), args[INDEX], at)

        return score

    fetching = [index for index, own in enumerate(parts) if own.fetch is not None]
    if len(fetching) != 1:
        return {"fetch": None, "score_fetched": None, "fetches": False}
    (THE_ONE,) = fetching
    own_fetch = parts[THE_ONE].fetch

    @verbs.verb
    def fetch(args, at):
        return own_fetch(args[THE_ONE], at)

    for index, own in enumerate(parts):
        if own.score is not None:
            score = then_fetched(score, own.fetched, index) if index == THE_ONE else then(score, own.score, index)
    return {"fetch": fetch, "score_fetched": score, "fetches": True}


def _curve(parts: Sequence[Parts], verbs: Verbs) -> Curve | None:
    changing = [index for index, own in enumerate(parts) if own.score is not None]
    if len(changing) != 1 or not (own := parts[changing[0]].curve):
        return None
    (THE_ONE,), own_rate, own_size = changing, own.rate, own.size

    @verbs.verb
    def rate(args):
        return own_rate(args[THE_ONE])

    @verbs.verb
    def size(args):
        return own_size(args[THE_ONE])

    return Curve(rate, size, own.verbs)


def _overlap(earlier: Callable[..., Any], own: Callable[..., Any], INDEX: int, verbs: Verbs) -> Callable[..., Any]:
    """Intersect two ranges."""
    larger, smaller = verbs.larger, verbs.smaller

    @verbs.verb
    def common(args, row, opposite, count):
        first, end = earlier(args, row, opposite, count)
        own_first, own_end = own(args[INDEX], row, opposite, count)
        return larger(first, own_first), smaller(end, own_end)

    return common


def _visible(parts: Parts, verbs: Verbs) -> Callable[..., Any]:
    """Return one function for all masks, for a pair within the sequences."""

    @verbs.verb
    def visible(args, at):
        first, end = parts.keys(args, at.i, at.position, UNBOUNDED)
        return (at.j >= first) & (at.j < end) & parts.pick(args, at)

    return visible


def _weights(parts: Parts, verbs: Verbs) -> Callable[..., Any]:
    """Return the function of eight probabilities' weights."""
    ZERO, NONE, low, where = verbs.number(0), verbs.low(0), verbs.low, verbs.where

    @verbs.verb
    def one(kept, bit, growth):
        return where(low(kept & low(bit)) != NONE, growth, ZERO)

    @verbs.verb
    def four(upper, lower, growth):
        left, right = one(upper, LEFT, growth), one(upper, RIGHT, growth)
        return left, right, one(lower, LEFT, growth), one(lower, RIGHT, growth)

    @verbs.verb
    def weights(args, at):
        growth = parts.growth(args)
        a, b, c, d = parts.keeps(args, at, parts.seed(args), 0, 0)
        return four(a, b, growth), four(c, d, growth)

    return weights


def _weight(weights: Callable[..., Any], verbs: Verbs, weighs: bool) -> Callable[..., Any]:
    """Return the function of one probability's weight."""
    ONE, integer, where = verbs.number(1), verbs.integer, verbs.where

    @verbs.verb
    def one(args, at):
        return ONE

    @verbs.verb
    def one_of_four(four, below, right):
        a, b, c, d = four
        return where(below == 0, where(right == 0, a, b), where(right == 0, c, d))

    @verbs.verb
    def weight(args, at):
        below, further, right = at.i & 8, at.j & 8, at.j & 1
        i, j, position = integer(at.i - below), integer(at.j - further - right), integer(at.position - below)
        near, far = weights(args, At(at.b, at.h, i, j, position, at.distance, 0))
        return where(further == 0, one_of_four(near, below, right), one_of_four(far, below, right))

    return weight if weighs else one


def _of_tiles(parts: Parts, verbs: Verbs, picks: bool) -> dict[str, Any]:
    """Return functions about a whole tile, derived from the ranges of its first and last row."""
    integer, ANY_MAY_BE_HIDDEN = verbs.integer, picks

    @verbs.verb
    def key_range(args, m0, m1, offset, Sk):
        first, _ = parts.keys(args, integer(m0), integer(m0 + offset), Sk)
        _, end = parts.keys(args, integer(m1 - 1), integer(m1 - 1 + offset), Sk)
        return first, end

    @verbs.verb
    def query_range(args, n0, n1, offset, Sq):
        first, _ = parts.queries(args, integer(n0), integer(n0 - offset), Sq)
        _, end = parts.queries(args, integer(n1 - 1), integer(n1 - 1 - offset), Sq)
        return first, end

    @verbs.verb
    def full(args, m0, m1, n0, n1, offset, Sq, Sk):
        if ANY_MAY_BE_HIDDEN:
            return False
        return within(args, m0, m1, n0, n1, offset, Sq, Sk)

    @verbs.verb
    def within(args, m0, m1, n0, n1, offset, Sq, Sk):
        _, end = parts.keys(args, integer(m0), integer(m0 + offset), Sk)
        first, _ = parts.keys(args, integer(m1 - 1), integer(m1 - 1 + offset), Sk)
        return (m1 <= Sq) & (n0 >= first) & (n1 <= end)

    return {"key_range": key_range, "query_range": query_range, "full": full, "within": within}
