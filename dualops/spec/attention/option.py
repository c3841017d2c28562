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
from typing import Any, NamedTuple

from ..base import Input, Param, Problem

LEFT, RIGHT = 0xFFFF, 0xFFFF0000  # of words that say whether two neighbours stay
MOST_BOUND = 0x7C00  # of `Verbs.at_least`
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
    low: Callable[[Any], Any]  # to an unsigned integer of its lower 32 bits
    product: Callable[[Any, Any], Any]  # of two such, a word
    where: Callable[[Any, Any, Any], Any]  # (condition, a, b)
    larger: Callable[[Any, Any], Any]  # of two integers
    smaller: Callable[[Any, Any], Any]
    tanh: Callable[[Any], Any]
    # (x, rate, size) -> size * tanh(rate * x), where 1e-6 of size is no error in dtypes of 16 bits
    bounded: Callable[..., Any]
    # (x, rate) -> 1 - tanh(rate * x)**2, which loses no digits where that would cancel
    tanh_slope: Callable[..., Any]
    reader: Callable[[str, int], Callable[..., Any]]  # (dtype, rank) -> (array, index, ...) -> value
    reader_at: Callable[[str, str], Callable[..., Any]]  # (dtype, order of `bias`) -> (array, at) -> value
    function: Callable[[Any], Callable[..., Any]]  # a user's function of numbers, a UserFunction
    # (words, bounds) -> words: where the lower 15 bits of a half are at least those of the bounds', at most MOST_BOUND,
    # all of the half, else nothing of it. None: a sum and a product do
    at_least: Any = None
    gradient: bool = False  # whether slopes are wanted, which not every function of a user has
    # (dtype) -> (array, at) -> 32 bits of a `bias` of pairs; and (bits, odd) -> one of the two numbers
    fetcher: Any = None
    tanh_curve: Any = None  # what kernels have for the `Curve` of tanh; None: nothing


class Curve(NamedTuple):
    """A score that is size * f(rate * score) wherever it stands, where f never falls: the greatest of many is made of
    the greatest product, so that a kernel may leave products as they are until it knows that.
    """

    rate: Any  # these two: (args) -> number above 0
    size: Any
    verbs: Any  # f, as a kernel takes it


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
    picks_keys: bool = False  # whether `pick` looks at the batch and the key alone
    seed: Any = None  # (args) -> a word, what `keeps` needs that may have to be read: a kernel asks once
    # (args, at, seed, below, right) -> four words of 32 bits, which of eight probabilities stay, 16 * below queries and
    # 16 * right keys further than `at`: of the first all bits LEFT for (i, j), or none, and RIGHT for (i, j + 1), the
    # next for (i + 8, j), and those 8 keys further. No score changes them, so a kernel may ask before it has scores
    keeps: Any = None
    growth: Any = None  # (args) -> what probabilities that stay are multiplied by
    sink: Any = None  # (args, h) -> a logit that has no value
    reads: bool = False  # whether `score` reads an array at the score's own place
    # (args, at) -> what `score` reads for two neighbouring keys, the first of them at `at`, before there are scores
    fetch: Any = None
    fetched: Any = None  # (score, args, what was fetched, odd) -> score: of the first key, or where `odd` of the other
    curve: Curve | None = None  # `score` once more, if it is such a one, and there are verbs for it


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


def variants(options: Sequence[Option], problem: Problem) -> tuple[OptionVariant, ...]:
    """The options that the problem has, in order."""
    found = ((option, option.variant(problem)) for option in options)
    return tuple(OptionVariant(option, facts) for option, facts in found if facts is not None)
