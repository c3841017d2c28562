"""What an operator does to the numbers of a row, and the arguments of every kernel of rows.

An operator is a frozen dataclass with the members of `Kind`. A walk, such as `cluster.build`, builds a kernel for it:
(arrays, params, rows, ...). It loads the numbers of a row, and the operator's verbs reduce and replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..compiler.backend import Namespace, Noun, i32, i64, types, verb
from ..launch.views import strided
from ..tile.ring import cluster_ctarank


class RowArrays(NamedTuple):
    """Arrays of rows [M, N], each `Strided`; null pointers where an operator has none."""

    y: Any  # the result
    summed: Any  # x + other as stored, of an operator that adds its inputs first
    x: Any  # the input
    other: Any  # the second input


class Rows(NamedTuple):
    """How many rows there are, and how they lie."""

    M: Any  # rows
    N: Any  # columns
    sizes: Any  # of the axes along which rows lie, the product of which is M


class Columns(NamedTuple):
    """Those of a row that a block has."""

    begin: int
    width: int


@verb
def columns_of_block(N, share):
    """Return those that my block of a cluster has of N, `share` or what is left."""
    begin = cluster_ctarank() * share
    return Columns(begin, min(share, N - begin))


class Keeping(NamedTuple):
    """How a walk keeps a row, which its operator is made for."""

    group: Noun  # how warps exchange numbers (exchange.py)
    row_threads: int  # threads of a block that share a row
    vectors: int  # accesses whose numbers `add` and `keep` get at once
    aligned: bool  # an access is a vector of 16 bytes, not one element
    columns: int = 0  # most columns of a block whose params wait in shared memory; 0: each thread loads them


class RowOperator(Namespace):
    """The verbs of an operator.

    frag: a local array of a thread's numbers of x, or of x + other as stored (ADDS). other: those of the second input.
    Beyond the row's end both hold FILL. params: what the operator needs besides arrays of rows. own: what `smem`
    returned. found: the numbers of the whole row, which `merge` or `keep` returned.
    """

    FILL: Any
    ADDS: bool  # the inputs are added first
    none: Callable[..., Any]  # () -> what is known of a row before its first number
    add: Callable[
        ..., Any
    ]  # (known, frag, other, present): the same with a frag, `present` of whose accesses have columns
    of_warp: Callable[..., Any]  # (known, own) -> the warp's two numbers
    merge: Callable[..., Any]  # (sent, at, own, N) -> found, of the numbers of all warps
    write: Callable[..., None]  # (frag, at, other, found, own, column, inside): an access of x becomes y's
    keep: Callable[..., Any]  # (frag, other, sent, left, own, N) -> found, of all numbers; frag may become others
    write_kept: Callable[..., None]  # `write`, after `keep`
    end: Callable[..., None]  # (found, own, place): store the row's numbers; by one thread of the row
    # shared memory
    smem: Callable[..., Any]  # (params) -> own, with the params; once in a kernel, by all threads
    prepare: Callable[..., None]  # (own, N, share): by all threads of the block, before others use it
    init: Callable[..., None]  # (own): initialize mbarriers, by one thread
    fetch: Callable[..., None]  # (own, columns): start copies, by one thread
    wait: Callable[..., None]  # (own): until they have arrived


@verb
def _no_smem(params):
    return params


@verb
def _nothing(own):
    pass


@verb
def _nothing_of_two(own, columns):
    pass


@verb
def _nothing_of_three(a, b, c):
    pass


# of an operator that has no params
PLAIN: dict[str, Any] = {"smem": _no_smem, "prepare": _nothing_of_three, "init": _nothing, "fetch": _nothing_of_two}
PLAIN |= {"wait": _nothing, "end": _nothing_of_three}


class Kind(Protocol):
    """An operator in one direction, with the dtypes that it is built for."""

    @property
    def dtype(self) -> str:
        """Of the arrays of rows."""
        ...

    @property
    def rank(self) -> int:
        """Axes along which rows lie."""
        ...

    @property
    def inputs(self) -> int:
        """How many arrays of rows it reads, 1 or 2."""
        ...

    @property
    def params_type(self) -> Any:
        """Numba's type of the operator's params."""
        ...

    def named(self, walk: str) -> str:
        """Return the name of its kernel of a walk."""
        ...

    def operator(self, keeping: Keeping) -> RowOperator:
        """Return its verbs."""
        ...

    def shared_bytes(self, columns: int) -> int:
        """Return the bytes of dynamic shared memory for the params of `columns` columns."""
        ...


def argument_types(kind: Kind) -> tuple[Any, ...]:
    """Return the types of arrays, params and rows."""
    return arrays_type(kind.dtype, kind.rank), kind.params_type, rows_type(kind.rank)


def arrays_type(dtype: str, rank: int) -> Any:
    """Return the type of `RowArrays`."""
    return types.NamedTuple((strided(dtype, rank),) * 4, RowArrays)


def rows_type(rank: int) -> Any:
    """Return the type of `Rows` along `rank` axes."""
    return types.NamedTuple((i64, i32, types.UniTuple(i64, rank)), Rows)
