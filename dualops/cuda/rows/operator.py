"""The verbs of an operator on rows, and the arguments of all kernels for rows.

An operator is a frozen dataclass with the members of `Kind`. A *walk*, such as `cluster.build`, builds a kernel for it,
with the arguments (arrays, params, rows, ...). The walk loads and stores the numbers of a row in its way; the
operator's verbs reduce and replace the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from ..compiler.backend import Members, Namespace, Noun, cuda, i32, i64, noun, types, verb
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.views import strided
from ..tile.ring import cluster_ctarank
from ..tile.storage import access, storage
from ..tile.unrolled import nothing


class RowArrays(NamedTuple):
    """Arrays of rows [M, N], each `Strided`; null pointers for arrays that an operator lacks."""

    y: Any  # the result
    summed: Any  # x + other, rounded to the storage dtype, if the operator adds its inputs first
    x: Any  # the input
    other: Any  # the second input


class Starts(NamedTuple):
    """Where a thread's numbers begin in both inputs."""

    x: Any
    other: Any


class Rows(NamedTuple):
    """The number of rows, their length and their layout."""

    M: Any  # rows
    N: Any  # columns
    sizes: Any  # sizes of the axes along which rows lie; their product is M


class Columns(NamedTuple):
    """The columns of a row that a block has."""

    begin: int
    width: int


@verb
def columns_of_block(N, share):
    """Return the columns of my block: `share` of N, or the rest for the last block of the cluster."""
    begin = cluster_ctarank() * share
    return Columns(begin, min(share, N - begin))


class Keeping(NamedTuple):
    """How a walk keeps a row; an operator's verbs are built for it."""

    group: Noun  # how warps exchange numbers (exchange.py)
    row_threads: int  # threads of a block that share a row
    vectors: int  # accesses whose numbers `add` and `keep` get at once
    aligned: bool  # whether an access is a vector of 16 bytes, not one element
    columns: int = 0  # most columns of a block whose params are in shared memory; 0: each thread loads them


class RowOperator(Namespace):
    """The verbs of an operator.

    frag: a local array of a thread's numbers of x, or of x + other, rounded (ADDS). other: its numbers of the second
    input. After the row's end both have FILL. params: the operator's arguments that are not arrays of rows. own: the
    result of `smem`. found: the numbers of the whole row that `merge` or `keep` returned.
    """

    FILL: Any
    ADDS: bool  # whether the inputs are added first
    none: Callable[..., Any]  # () -> known: the state of a row before its first number
    # (known, frag, other, present): the same with a frag, `present` of whose accesses have columns
    add: Callable[..., Any]
    of_warp: Callable[..., Any]  # (known, own) -> the warp's two numbers
    merge: Callable[..., Any]  # (sent, at, own, N) -> found, from the numbers of all warps
    write: Callable[..., None]  # (frag, at, other, found, own, column, inside): an access of x becomes y's
    keep: Callable[..., Any]  # (frag, other, sent, left, own, N) -> found, from all numbers; may change frag
    write_kept: Callable[..., None]  # `write`, after `keep`
    end: Callable[..., None]  # (found, own, place): store the row's numbers; by one thread of the row
    # shared memory
    smem: Callable[..., Any]  # (params) -> own, with the params; once in a kernel, by all threads
    prepare: Callable[..., None]  # (own, N, share): by all threads of the block, before others use it
    init: Callable[..., None]  # (own): initialize mbarriers, by one thread
    fetch: Callable[..., None]  # (own, columns): start copies, by one thread
    wait: Callable[..., None]  # (own): wait until they have arrived


@verb
def _no_smem(params):
    return params


# the verbs of an operator without params
PLAIN: dict[str, Any] = {"smem": _no_smem, "prepare": nothing(3), "init": nothing(1), "fetch": nothing(2)}
PLAIN |= {"wait": nothing(1), "end": nothing(3)}


class Kind(Protocol):
    """An operator in one direction, with its dtypes."""

    @property
    def dtype(self) -> str: ...  # of the arrays of rows
    @property
    def rank(self) -> int: ...  # axes along which rows lie
    @property
    def inputs(self) -> int: ...  # arrays of rows that it reads, 1 or 2
    @property
    def params_type(self) -> Any: ...  # Numba's type of its params
    def named(self, walk: str) -> str: ...  # the name of its kernel for a walk
    def operator(self, keeping: Keeping) -> RowOperator: ...  # its verbs
    def shared_bytes(self, columns: int) -> int: ...  # dynamic shared memory for the params of `columns` columns


@noun
def inputs_of(kind: Any, op: RowOperator, vectors: int, aligned: bool) -> Members:
    """The verbs of a thread's `vectors` accesses to both inputs. aligned: as in `Keeping`."""
    mem, vec, TWO = storage(kind.dtype), access(kind.dtype, aligned), kind.inputs > 1
    SIZE = vectors * vec.vector
    OTHER = SIZE if TWO else 1

    @verb
    def fragments():
        """Return local arrays for the numbers of x, and of the other input."""
        return cuda.local.array(SIZE, mem.number), cuda.local.array(OTHER, mem.number)

    @verb
    def load(frag, other, j, arrays, starts, at, keep):
        """Load access number j, `at` elements from the starts of both arrays on."""
        vec.load(frag, j * vec.vector, arrays.x.data, starts.x + at, keep, op.FILL)
        if TWO:
            vec.load(other, j * vec.vector, arrays.other.data, starts.other + at, keep, op.FILL)

    @verb
    def add(frag, other):
        """Add the inputs, if the operator does so first."""
        if op.ADDS:
            for i in range(SIZE):
                frag[i] = mem.rounded(frag[i] + other[i])

    return locals()


def choices_of_calls(
    call: Callable[..., Any], rungs: Iterable[Callable[[Any, Device], Iterator[Choice]]], *, backward: bool
) -> tuple[Callable[..., Iterator[Choice]], ...]:
    """Return the rungs of an operation: choices for a problem, its results and a device. rungs: choices for a call and
    a device. call: makes the call of a problem.
    """

    def of_problems(rung: Callable[[Any, Device], Iterator[Choice]]) -> Callable[..., Iterator[Choice]]:
        return lambda problem, results, device: rung(call(problem, results, backward=backward), device)

    return tuple(map(of_problems, rungs))


def argument_types(kind: Kind) -> tuple[Any, ...]:
    """Return the types of arrays, params and rows."""
    return arrays_type(kind.dtype, kind.rank), kind.params_type, rows_type(kind.rank)


def arrays_type(dtype: str, rank: int) -> Any:
    """Return the type of `RowArrays`."""
    return types.NamedTuple((strided(dtype, rank),) * 4, RowArrays)


def rows_type(rank: int) -> Any:
    """Return the type of `Rows` along `rank` axes."""
    return types.NamedTuple((i64, i32, types.UniTuple(i64, rank)), Rows)
