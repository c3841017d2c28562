"""What an option of attention is: one record, which the reference and every kernel take as it stands.

    scale * q @ k.T -> score, score, ... -> visible -> softmax (with a sink) -> weight -> @ v

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

UNBOUNDED = 2**40  # further than any sequence is long


class At(NamedTuple):
    """Where scores stand: numbers in a kernel; in NumPy arrays that broadcast to [B, H, Sq, Sk]."""

    b: Any
    h: Any
    i: Any  # query, counted from 0 in its sequence
    j: Any  # key
    position: Any  # of query i among the keys: i + Sk - Sq, or i


class Verbs(NamedTuple):
    """What the functions of an option are written in: the same words for NumPy and for a kernel."""

    verb: Callable[[Callable[..., Any]], Callable[..., Any]]  # decorator of every function
    number: Callable[[Any], Any]  # to the type that arithmetic is carried in
    word: Callable[[Any], Any]  # to an unsigned integer of 64 bits
    where: Callable[[Any, Any, Any], Any]  # (condition, a, b)
    tanh: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    reader: Callable[[str, int], Callable[..., Any]]  # (dtype, rank) -> (array, index, ...) -> value
    function: Callable[[Any], Callable[..., Any]]  # a user's function of numbers, a UserFunction
    gradient: bool = False  # whether slopes are wanted, which not every function of a user has


class Parts(NamedTuple):
    """The functions of an option; what it does not do is None. `args` are its own arguments, `at` is an At.

    Ranges and tiles are for kernels that go tile by tile: queries m0 to m1, keys n0 to n1 (ends excluded), `offset`
    the position of query 0.
    """

    score: Any = None  # (score, args, at) -> score
    slope: Any = None  # (score, args, at) -> d score(score) / d score; None: 1
    visible: Any = None  # (args, at) -> whether the query sees the key
    key_range: Any = None  # (args, m0, m1, offset) -> keys that some of the queries may see
    query_range: Any = None  # (args, n0, n1, offset) -> queries that may see some of the keys
    full: Any = None  # (args, m0, m1, n0, n1, offset) -> whether all of them see all
    weight: Any = None  # (args, at) -> what multiplies a probability before it meets v
    sink: Any = None  # (args, h) -> a logit that has no value


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
    """All options of a problem as one. `args` is the tuple of their arguments, in order."""

    score: Callable[..., Any]  # (score, args, at) -> score
    slope: Callable[..., Any]  # (score, args, at) -> d score(score) / d score
    visible: Callable[..., Any]  # (args, at) -> bool
    key_range: Callable[..., Any]  # (args, m0, m1, offset, Sk) -> first, end
    query_range: Callable[..., Any]  # (args, n0, n1, offset, Sq) -> first, end
    full: Callable[..., Any]  # (args, m0, m1, n0, n1, offset) -> bool
    weight: Callable[..., Any]  # (args, at) -> number
    sink: Callable[..., Any]  # (args, h) -> number; -inf where there is no sink
    scores: bool = False  # whether some option changes scores,
    bends: bool = False  # with a slope that may be other than 1,
    weighs: bool = False  # and whether probabilities have a weight,
    sinks: bool = False  # and rows a sink


def variants(options: Sequence[Option], problem: Problem) -> tuple[OptionVariant, ...]:
    """The options that the problem has, in order."""
    found = ((option, option.variant(problem)) for option in options)
    return tuple(OptionVariant(option, facts) for option, facts in found if facts is not None)


def compose(having: Sequence[OptionVariant], verbs: Verbs) -> Chain:
    """The chain of the options that a problem has, made of functions for the place that `verbs` are for."""
    chain = _nothing(verbs)
    for index, (option, facts) in enumerate(having):
        chain = _extended(chain, option.make(verbs, facts), index, verbs)
    return chain


def _nothing(verbs: Verbs) -> Chain:
    """The chain of a problem without options."""
    ONE, NOTHING = verbs.number(1), verbs.number(-inf)

    @verbs.verb
    def score(score, args, at):
        return score

    @verbs.verb
    def slope(score, args, at):
        return ONE

    @verbs.verb
    def visible(args, at):
        return True

    @verbs.verb
    def key_range(args, m0, m1, offset, Sk):
        return 0, Sk

    @verbs.verb
    def query_range(args, n0, n1, offset, Sq):
        return 0, Sq

    @verbs.verb
    def full(args, m0, m1, n0, n1, offset):
        return True

    @verbs.verb
    def weight(args, at):
        return ONE

    @verbs.verb
    def sink(args, h):
        return NOTHING

    return Chain(score, slope, visible, key_range, query_range, full, weight, sink)


def _extended(chain: Chain, parts: Parts, INDEX: int, verbs: Verbs) -> Chain:
    """The chain with one more option, whose arguments are number INDEX."""
    earlier, own = chain, parts
    earlier_score, own_score = chain.score, parts.score
    if own.score is not None:

        @verbs.verb
        def score(score, args, at):
            return own_score(earlier_score(score, args, at), args[INDEX], at)

        chain = chain._replace(score=score, scores=True)
    if own.slope is not None:
        earlier_slope, own_slope = earlier.slope, own.slope

        @verbs.verb
        def slope(score, args, at):
            return earlier_slope(score, args, at) * own_slope(earlier_score(score, args, at), args[INDEX], at)

        chain = chain._replace(slope=slope, bends=True)
    if own.visible is not None:
        chain = chain._replace(**_masked(earlier, own, INDEX, verbs))
    if own.weight is not None:
        earlier_weight, own_weight = earlier.weight, own.weight

        @verbs.verb
        def weight(args, at):
            return earlier_weight(args, at) * own_weight(args[INDEX], at)

        chain = chain._replace(weight=weight, weighs=True)
    if own.sink is not None:
        own_sink = own.sink

        @verbs.verb
        def sink(args, h):
            return own_sink(args[INDEX], h)

        chain = chain._replace(sink=sink, sinks=True)
    return chain


def _masked(earlier: Chain, own: Parts, INDEX: int, verbs: Verbs) -> dict[str, Callable[..., Any]]:
    """The parts of a chain that one more mask changes. A mask without ranges may let through any pair or none."""
    earlier_visible, own_visible = earlier.visible, own.visible
    earlier_full, own_full = earlier.full, own.full
    earlier_keys, own_keys = earlier.key_range, own.key_range
    earlier_queries, own_queries = earlier.query_range, own.query_range

    @verbs.verb
    def visible(args, at):
        return earlier_visible(args, at) & own_visible(args[INDEX], at)

    @verbs.verb
    def full(args, m0, m1, n0, n1, offset):
        return earlier_full(args, m0, m1, n0, n1, offset) & own_full(args[INDEX], m0, m1, n0, n1, offset)

    @verbs.verb
    def never_full(args, m0, m1, n0, n1, offset):
        return False

    @verbs.verb
    def key_range(args, m0, m1, offset, Sk):
        first, end = earlier_keys(args, m0, m1, offset, Sk)
        own_first, own_end = own_keys(args[INDEX], m0, m1, offset)
        return max(first, own_first), min(end, own_end)

    @verbs.verb
    def query_range(args, n0, n1, offset, Sq):
        first, end = earlier_queries(args, n0, n1, offset, Sq)
        own_first, own_end = own_queries(args[INDEX], n0, n1, offset)
        return max(first, own_first), min(end, own_end)

    changed: dict[str, Callable[..., Any]] = {"visible": visible, "full": never_full if own.full is None else full}
    if own.key_range is not None:
        changed["key_range"] = key_range
    if own.query_range is not None:
        changed["query_range"] = query_range
    return changed
