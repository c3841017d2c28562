"""What an option of attention is: one record, which the reference and every kernel take as it stands.

    scale * q @ k.T -> score, score, ... -> masks -> softmax (with a sink) -> weights -> @ v

A mask is best said as a range: the keys that a query sees, and the queries that see a key. It costs two comparisons a
score, only in tiles that it cuts, and tiles that nobody sees are skipped. A mask that has no such form picks pairs.

An option's parts are Python functions of numbers. NumPy calls them on arrays that broadcast against one another, the
simulator on NumPy scalars, a kernel inlines them into its registers; what differs between the three they get handed in
(`Verbs`). Whether a problem has the option is known when a kernel is built (`variant`), its values when it is launched
(`args`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from ..base import Input, Param, Problem

UNBOUNDED = 2**31 - 1  # no sequence is longer: places in it are integers of 32 bits


class At(NamedTuple):
    """Where scores stand: numbers in a kernel, i, j and position of 32 bits; in NumPy arrays that broadcast to
    [B, H, Sq, Sk].
    """

    b: Any
    h: Any
    i: Any  # query, counted from 0 in its sequence
    j: Any  # key
    position: Any  # of query i among the keys: i + Sk - Sq, or i
    distance: Any  # position - j, in the type that arithmetic is carried in
    odd: Any  # j % 2


class Verbs(NamedTuple):
    """What the functions of an option are written in: the same words for NumPy and for a kernel."""

    verb: Callable[[Callable[..., Any]], Callable[..., Any]]  # decorator of every function
    number: Callable[[Any], Any]  # to the type that arithmetic is carried in
    integer: Callable[[Any], Any]  # to the type of places, 32 bits: what a sum or difference of them is put into
    wide: Callable[[Any], Any]  # to an integer of 64 bits
    word: Callable[[Any], Any]  # to an unsigned integer of 64 bits
    where: Callable[[Any, Any, Any], Any]  # (condition, a, b)
    larger: Callable[[Any, Any], Any]  # of two integers
    smaller: Callable[[Any, Any], Any]
    tanh: Callable[[Any], Any]
    # (x, rate, size) -> size * tanh(rate * x), where 1e-6 of size is no error in dtypes of 16 bits
    bounded: Callable[..., Any]
    exp: Callable[[Any], Any]
    reader: Callable[[str, int], Callable[..., Any]]  # (dtype, rank) -> (array, index, ...) -> value
    reader_at: Callable[[str, str], Callable[..., Any]]  # (dtype, order of `bias`) -> (array, at) -> value
    function: Callable[[Any], Callable[..., Any]]  # a user's function of numbers, a UserFunction
    gradient: bool = False  # whether slopes are wanted, which not every function of a user has


class Parts(NamedTuple):
    """The functions of an option; what it does not do is None. `args` are its own arguments, `at` is an At.

    A range is a first and an end, which is excluded; it is empty where the end is not above the first. Neither falls
    from one query to the next, nor from one key to the next: so a tile's first and last row tell of all of it.
    `opposite` is the key that query i stands at, or the query that stands at key j, which need not be there: from -2^31
    to below 2^31, so that a sum with it may pass 32 bits (`band` takes care of that).
    """

    score: Any = None  # (score, args, at) -> score
    slope: Any = None  # (score, args, at) -> d score(score) / d score; None: 1
    keys: Any = None  # (args, i, opposite, Sk) -> first, end: the keys that query i sees, at most Sk
    queries: Any = None  # (args, j, opposite, Sq) -> first, end: the queries that see key j, at most Sq
    pick: Any = None  # (args, at) -> whether the query sees the key, which is asked within ranges alone
    # (args, at) -> of four probabilities: (i, j), (i, j + 1), (i + 8, j), (i + 8, j + 1); and of those 8 keys further
    weights: Any = None
    sink: Any = None  # (args, h) -> a logit that has no value
    reads: bool = False  # whether `score` reads an array at the score's own place


@dataclass(frozen=True)
class Option:
    """An option; see the module's docstring.

    check(op, arrays, params, sizes) raises ValueError for what axes and domains can't say, in a message that begins
    with `op`.
    variant: what a kernel must know of the option when it is built, None where the problem does not have it.
    args: a NamedTuple of what it gets at its launch: integers, floats, names of numbers on the host, Strided arrays.
    """

    name: str
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    variant: Callable[[Problem], Hashable]
    args: Callable[[Problem], tuple[Any, ...]]
    make: Callable[[Verbs, Any], Parts]
    check: Callable[[str, dict[str, Any], dict[str, Any], dict[str, Any]], None] = lambda op, arrays, params, sizes: (
        None
    )


class OptionVariant(NamedTuple):
    """An option that a problem has, as a kernel is built for it."""

    option: Option
    facts: Any

    def __repr__(self) -> str:
        return f"{self.option.name}={self.facts!r}"


class Chain(NamedTuple):
    """All options of a problem as one. `args` is the tuple of their arguments, in order.

    Queries m0 to m1 and keys n0 to n1 (ends excluded) are a tile of at least one; `offset` is the position of query 0.
    """

    score: Callable[..., Any]  # (score, args, at) -> score
    slope: Callable[..., Any]  # (score, args, at) -> d score(score) / d score
    keys: Callable[..., Any]  # (args, i, opposite, Sk) -> first, end: within 0 and Sk
    queries: Callable[..., Any]  # (args, j, opposite, Sq) -> first, end: within 0 and Sq
    pick: Callable[..., Any]  # (args, at) -> bool: whether a pair within these ranges is seen
    weights: Callable[..., Any]  # (args, at) -> twice four numbers, as in Parts
    sink: Callable[..., Any]  # (args, h) -> number; -inf where there is no sink
    visible: Callable[..., Any]  # (args, at) -> bool: by ranges and by picks
    weight: Callable[..., Any]  # (args, at) -> number: the one of eight that is of this score
    key_range: Callable[..., Any]  # (args, m0, m1, offset, Sk) -> first, end of what some of the queries may see
    query_range: Callable[..., Any]  # (args, n0, n1, offset, Sq) -> first, end of what may see some of the keys
    full: Callable[..., Any]  # (args, m0, m1, n0, n1, offset, Sq, Sk) -> bool: whether all are there and see all
    within: Callable[..., Any]  # the same as far as ranges tell, whatever picks say
    scores: bool  # whether some option changes scores,
    bends: bool  # with a slope that may be other than 1,
    picks: bool  # some mask picks pairs,
    weighs: bool  # and whether probabilities have a weight,
    sinks: bool  # and rows a sink
    reads: bool  # whether scores read an array at their places


def variants(options: Sequence[Option], problem: Problem) -> tuple[OptionVariant, ...]:
    """The options that the problem has, in order."""
    found = ((option, option.variant(problem)) for option in options)
    return tuple(OptionVariant(option, facts) for option, facts in found if facts is not None)


def compose(having: Sequence[OptionVariant], verbs: Verbs) -> Chain:
    """The chain of the options that a problem has, made of functions for the place that `verbs` are for."""
    parts = [option.make(verbs, facts) for option, facts in having]
    joined = _nothing(verbs)
    for index, own in enumerate(parts):
        joined = _joined(joined, own, index, verbs)

    def some(name: str) -> bool:
        return any(getattr(own, name) is not None for own in parts)

    picks, weighs = some("pick"), some("weights")
    return Chain(
        **joined._asdict(),
        visible=_visible(joined, verbs),
        weight=_weight(joined, verbs, weighs),
        **_of_tiles(joined, verbs, picks),
        scores=some("score"),
        bends=some("slope"),
        picks=picks,
        weighs=weighs,
        sinks=some("sink"),
    )


def _nothing(verbs: Verbs) -> Parts:
    """What a problem without options has, of the arguments of all options, as have `_joined` and all below."""
    ONE, NOTHING, integer = verbs.number(1), verbs.number(-inf), verbs.integer

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
    def weights(args, at):
        return (ONE, ONE, ONE, ONE), (ONE, ONE, ONE, ONE)

    @verbs.verb
    def sink(args, h):
        return NOTHING

    return Parts(score, slope, within, within, pick, weights, sink)


def _joined(earlier: Parts, own: Parts, INDEX: int, verbs: Verbs) -> Parts:
    """With one more option, whose arguments are number INDEX."""
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
    if own.weights is not None:

        @verbs.verb
        def four_products(x, y):
            return x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]

        @verbs.verb
        def weights(args, at):
            near, far = earlier.weights(args, at)
            own_near, own_far = own.weights(args[INDEX], at)
            return four_products(near, own_near), four_products(far, own_far)

        joined = joined._replace(weights=weights)
    if own.sink is not None:

        @verbs.verb
        def sink(args, h):
            return own.sink(args[INDEX], h)

        joined = joined._replace(sink=sink)
    return joined


def _overlap(earlier: Callable[..., Any], own: Callable[..., Any], INDEX: int, verbs: Verbs) -> Callable[..., Any]:
    """What two ranges have in common."""
    larger, smaller = verbs.larger, verbs.smaller

    @verbs.verb
    def common(args, row, opposite, count):
        first, end = earlier(args, row, opposite, count)
        own_first, own_end = own(args[INDEX], row, opposite, count)
        return larger(first, own_first), smaller(end, own_end)

    return common


def _visible(parts: Parts, verbs: Verbs) -> Callable[..., Any]:
    """Masks as one question about a pair that is there."""

    @verbs.verb
    def visible(args, at):
        first, end = parts.keys(args, at.i, at.position, UNBOUNDED)
        return (at.j >= first) & (at.j < end) & parts.pick(args, at)

    return visible


def _weight(parts: Parts, verbs: Verbs, weighs: bool) -> Callable[..., Any]:
    """The weight of one probability."""
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
        near, far = parts.weights(args, At(at.b, at.h, i, j, position, at.distance, 0))
        return where(further == 0, one_of_four(near, below, right), one_of_four(far, below, right))

    return weight if weighs else one


def _of_tiles(parts: Parts, verbs: Verbs, picks: bool) -> dict[str, Any]:
    """What the ranges of the first and the last row say of a tile."""
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
