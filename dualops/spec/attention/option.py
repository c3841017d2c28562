"""What an option of attention is: one record, which the reference and every kernel share.

    scale * q @ k.T -> score, score, ... -> masks -> softmax (with a sink) -> weights -> @ v

A mask is best written as a range: the keys that a query sees, and the queries that see a key. A range costs two
comparisons per score, only in tiles that it cuts, and tiles outside it are skipped. A mask without such a form picks
pairs.

An option's parts are Python functions of numbers. NumPy calls them on arrays that broadcast together, the simulator on
NumPy scalars, and a kernel inlines them. What differs between the three comes as an argument (`Verbs`). Whether a
problem has the option is known when a kernel is built (`variant`), its values at the launch (`args`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..base import Input, Param, Problem

LEFT, RIGHT = 0xFFFF, 0xFFFF0000  # in words that say whether two neighbours stay
MOST_BOUND = 0x7C00  # for `Verbs.at_least`
UNBOUNDED = 2**31 - 1  # no sequence is longer: places in it are 32-bit integers


class At(NamedTuple):
    """Places of scores: in a kernel numbers, with i, j and position of 32 bits; in NumPy arrays that broadcast to
    [B, H, Sq, Sk].
    """

    b: Any
    h: Any
    i: Any  # query, counted from 0 in its sequence
    j: Any  # key
    position: Any  # of query i among the keys: i + Sk - Sq, or i
    distance: Any  # position - j, in the type of arithmetic
    odd: Any  # j % 2


class Verbs(NamedTuple):
    """The operations that an option's functions use, under the same names for NumPy and for a kernel."""

    verb: Callable[[Callable[..., Any]], Callable[..., Any]]  # decorator of every function
    number: Callable[[Any], Any]  # to the type of arithmetic
    integer: Callable[[Any], Any]  # to the 32-bit type of places; wrap sums and differences of places in it
    wide: Callable[[Any], Any]  # to an integer of 64 bits
    word: Callable[[Any], Any]  # to an unsigned integer of 64 bits
    low: Callable[[Any], Any]  # to an unsigned 32-bit integer of the lower bits
    product: Callable[[Any, Any], Any]  # of two 32-bit integers, a word
    where: Callable[[Any, Any, Any], Any]  # (condition, a, b)
    larger: Callable[[Any, Any], Any]  # of two integers
    smaller: Callable[[Any, Any], Any]
    tanh: Callable[[Any], Any]
    # (x, rate, size) -> size * tanh(rate * x); in 16-bit dtypes the error may be 1e-6 of size
    bounded: Callable[..., Any]
    # (x, rate) -> 1 - tanh(rate * x)**2, without cancellation
    tanh_slope: Callable[..., Any]
    reader: Callable[[str, int], Callable[..., Any]]  # (dtype, rank) -> (array, index, ...) -> value
    reader_at: Callable[[str, str], Callable[..., Any]]  # (dtype, order of `bias`) -> (array, at) -> value
    function: Callable[[Any], Callable[..., Any]]  # a user's function of numbers, a UserFunction
    # (words, bounds) -> words: each half is all ones where its lower 15 bits are at least the bound's (at most
    # MOST_BOUND), else 0. None: use a sum and a product
    at_least: Any = None
    gradient: bool = False  # whether slopes are needed, which some user functions lack
    # (dtype) -> (array, at) -> 32 bits of a `bias` of pairs; and (bits, odd) -> one of its two numbers
    fetcher: Any = None
    tanh_curve: Any = None  # the kernels' form of the `Curve` of tanh; None if there is none


class Curve(NamedTuple):
    """A score of the form size * f(rate * score) for every pair, with a nondecreasing f.

    The largest score then comes from the largest product: a kernel may keep plain products until it knows that one.
    """

    rate: Any  # both: (args) -> number above 0
    size: Any
    verbs: Any  # f, in the kernels' form


class Parts(NamedTuple):
    """The functions of an option; None for those that it does not need. `args` are its own arguments, `at` is an At.

    A range is a first and an excluded end; it is empty if the end is not above the first. Both are nondecreasing from
    one query to the next, and from one key to the next: a tile's first and last row bound the whole tile. `opposite` is
    the key at query i's position, or the query at key j's position. It need not exist: it is from -2^31 to below 2^31,
    and a sum with it may exceed 32 bits (`band` handles that).
    """

    score: Any = None  # (score, args, at) -> score
    slope: Any = None  # (score, args, at) -> d score(score) / d score; None: 1
    keys: Any = None  # (args, i, opposite, Sk) -> first, end: the keys that query i sees, at most Sk
    queries: Any = None  # (args, j, opposite, Sq) -> first, end: the queries that see key j, at most Sq
    pick: Any = None  # (args, at) -> whether the query sees the key; only called within the ranges
    picks_keys: bool = False  # whether `pick` depends only on the batch and the key
    seed: Any = None  # (args) -> a word that `keeps` needs; a kernel calls it once, since it may read memory
    # (args, at, seed, below, right) -> four 32-bit words, which of eight probabilities stay, 16 * below queries and
    # 16 * right keys further than `at`. In the first word the bits LEFT are all set for (i, j), or none, and RIGHT for
    # (i, j + 1). The next word is for (i + 8, j), the last two for those 8 keys further. Scores do not matter, so a
    # kernel may call it before it has them
    keeps: Any = None
    growth: Any = None  # (args) -> factor of the probabilities that stay
    sink: Any = None  # (args, h) -> a logit without a value
    reads: bool = False  # whether `score` reads an array at the score's own place
    # (args, at) -> what `score` reads for two neighbouring keys, the first at `at`; callable before there are scores
    fetch: Any = None
    fetched: Any = None  # (score, args, fetched word, odd) -> score: of the first key, or if `odd` of the other
    curve: Curve | None = None  # `score` as a curve, if it has that form and `Verbs` supports it


@dataclass(frozen=True)
class Option:
    """An option; see the module's docstring.

    check(op, arrays, params, sizes) raises ValueError for what axes and domains can't express, in a message that begins
    with `op`.
    variant: what a kernel must know of the option when it is built, None if the problem does not have it.
    args: a NamedTuple of its launch arguments: integers, floats, names of numbers on the host, Strided arrays.
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
    """An option of a problem, with what a kernel must know to be built."""

    option: Option
    facts: Any

    def __repr__(self) -> str:
        return f"{self.option.name}={self.facts!r}"


def variants(options: Sequence[Option], problem: Problem) -> tuple[OptionVariant, ...]:
    """Return the options of the problem, in order."""
    found = ((option, option.variant(problem)) for option in options)
    return tuple(OptionVariant(option, facts) for option, facts in found if facts is not None)
