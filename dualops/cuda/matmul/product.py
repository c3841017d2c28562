"""A matrix product described by axes and strides. All kernels here compute it; forward and both gradients are such
products.

    y[batch, m, n] = sum over outer and k of  a[batch, outer, m, k] * b[batch, outer, k, n]

An axis has a size, and a stride in each array: 0 if the array is broadcast along it. So a transpose is a change of
strides. Outer axes are batch axes over which a gradient is summed. `folded` merges axes that are one axis in memory. A
batch of matrices that multiply the same b becomes one taller matrix (a linear layer). A batch over which db is summed
becomes one longer sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Members, i64, kept_noun, members, noun, pointer, types, u32, verb
from ..tile.storage import storage


class Axis(NamedTuple):
    """An axis: its size, and its strides in the result, the preactivation and both factors."""

    size: int
    y: int = 0
    z: int = 0
    a: int = 0
    b: int = 0


class Product(NamedTuple):
    """See the module's docstring. names: the names of the arrays y, z, a, b and bias, "" for a missing one."""

    names: tuple[str, str, str, str, str]
    batch: tuple[Axis, ...]
    outer: tuple[Axis, ...]
    m: Axis
    n: Axis
    k: Axis
    bias_stride: int = 0

    @property
    def batches(self) -> int:
        return prod(axis.size for axis in self.batch)

    @property
    def rounds(self) -> int:
        """Return the number of matrix products that are summed to an element of the result."""
        return prod(axis.size for axis in self.outer)


class _Matrices(NamedTuple):
    """Strides of an array along the result's batch axes, and along its rows and columns after the transpose."""

    batch: tuple[int, ...]
    row: int
    column: int


def _matrices(meta: ArrayMeta | None, rank: int, transposed: bool = False) -> _Matrices:
    if meta is None:
        return _Matrices((0,) * rank, 0, 0)
    own = [0 if size == 1 else stride for size, stride in zip(meta.shape[:-2], meta.strides[:-2], strict=True)]
    row, column = reversed(meta.strides[-2:]) if transposed else meta.strides[-2:]
    return _Matrices((0,) * (rank - len(own)) + tuple(own), row, column)


def needs_tensor_cores(problem: Problem) -> bool:
    """Whether the call asks for a precision that CUDA cores do not have."""
    return problem.dtype == "float32" and problem.precision is not None


def forward_product(p: Problem, metas: Mapping[str, ArrayMeta]) -> Product:
    """Return the product of forward: y = op(a) @ op(b)."""
    rank = len(p.batch)
    y, z = _matrices(metas["y"], rank), _matrices(metas.get("preactivation"), rank)
    a, b = _matrices(metas["a"], rank, p.transpose_a), _matrices(metas["b"], rank, p.transpose_b)
    bias = metas.get("bias")
    return folded(
        Product(
            ("y", "preactivation" if "preactivation" in metas else "", "a", "b", "bias" if bias else ""),
            tuple(Axis(*axis) for axis in zip(p.batch, y.batch, z.batch, a.batch, b.batch, strict=True)),
            (),
            Axis(p.M, y=y.row, z=z.row, a=a.row),
            Axis(p.N, y=y.column, z=z.column, b=b.column),
            Axis(p.K, a=a.column, b=b.row),
            bias.strides[0] if bias else 0,
        )
    )


def a_gradient_product(p: Problem, metas: Mapping[str, ArrayMeta], dz_name: str) -> Product:
    """op(da) [M, K] = dz [M, N] @ op(b).T, summed over the axes along which a was broadcast."""
    rank = len(p.batch)
    da, dz = _matrices(metas["da"], rank, p.transpose_a), _matrices(metas[dz_name], rank)
    b = _matrices(metas["b"], rank, p.transpose_b)
    return folded(
        Product(
            ("da", "", dz_name, "b", ""),
            *_kept_and_summed(p, metas["da"], da, dz, b),
            Axis(p.M, y=da.row, a=dz.row),
            Axis(p.K, y=da.column, b=b.row),
            Axis(p.N, a=dz.column, b=b.column),
        )
    )


def b_gradient_product(p: Problem, metas: Mapping[str, ArrayMeta], dz_name: str) -> Product:
    """op(db) [K, N] = op(a).T @ dz [M, N], summed over the axes along which b was broadcast."""
    rank = len(p.batch)
    db, dz = _matrices(metas["db"], rank, p.transpose_b), _matrices(metas[dz_name], rank)
    a = _matrices(metas["a"], rank, p.transpose_a)
    return folded(
        Product(
            ("db", "", "a", dz_name, ""),
            *_kept_and_summed(p, metas["db"], db, a, dz),
            Axis(p.K, y=db.row, a=a.column),
            Axis(p.N, y=db.column, b=dz.column),
            Axis(p.M, a=a.row, b=dz.row),
        )
    )


def _kept_and_summed(
    p: Problem, meta: ArrayMeta, y: _Matrices, a: _Matrices, b: _Matrices
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the batch axes that a gradient has, and those over which it is summed."""
    own = (1,) * (len(p.batch) + 2 - len(meta.shape)) + meta.shape[:-2]
    kept, summed = [], []
    for size, its_size, y_step, a_step, b_step in zip(p.batch, own, y.batch, a.batch, b.batch, strict=True):
        (kept if its_size == size else summed).append(Axis(size, y=y_step, a=a_step, b=b_step))
    return tuple(kept), tuple(summed)


# --- folding -------------------------------------------------------------------------------------


def folded(given: Product) -> Product:
    """Return the same product with as few axes as its strides allow, and with columns contiguous in the result."""
    batch, k = _merged(given.batch), given.k
    outer = _merged(given.outer)
    if any(axis.size == 0 for axis in outer):
        outer, k = (), k._replace(size=0)
    # rows of a batch that all multiply the same b
    batch, m = _absorbed(batch, given.m, lambda axis: axis.b == 0)
    outer, k = _absorbed(outer, k, lambda axis: True)
    m, n, k = map(_in_place, (m, given.n, k))
    found = given._replace(batch=batch, outer=outer, m=m, n=n, k=k)
    upright = found.m.y == 1 and found.n.y != 1 and not found.names[4]  # a bias has an element for each column
    return _transposed(found) if upright else found


def _in_place(axis: Axis) -> Axis:
    """Return an axis. One of size 1 loses its strides, which may have any value and are not used."""
    return Axis(1) if axis.size == 1 else axis


def _merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Merge neighbours that are one axis in every array, and drop axes of size 1."""
    found: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        whole = _as_one(found[-1], axis) if found else None
        if whole:
            found[-1] = whole
        else:
            found.append(axis)
    return tuple(found)


def _absorbed(axes: tuple[Axis, ...], inner: Axis, may: Callable[[Axis], bool]) -> tuple[tuple[Axis, ...], Axis]:
    """Merge axes into `inner` if all arrays allow it. Return the other axes and the merged one."""
    left = list(axes)
    while whole := next(((a, one) for a in reversed(left) if may(a) and (one := _as_one(a, inner))), None):
        left.remove(whole[0])
        inner = whole[1]
    return tuple(left), inner


def _as_one(outer: Axis, inner: Axis) -> Axis | None:
    """Return two axes as one, None if they are two in some array."""
    if inner.size == 1:
        return outer
    if outer.size == 1:
        return inner
    if all(step == inner.size * own for step, own in zip(outer[1:], inner[1:], strict=True)):
        return inner._replace(size=outer.size * inner.size)
    return None


def _transposed(given: Product) -> Product:
    """y.T = b.T @ a.T."""

    def swapped(axis: Axis) -> Axis:
        return axis._replace(a=axis.b, b=axis.a)

    y, z, a, b, bias = given.names
    batch, outer = (tuple(map(swapped, axes)) for axes in (given.batch, given.outer))
    return Product((y, z, b, a, bias), batch, outer, swapped(given.n), swapped(given.m), swapped(given.k))


# --- arguments of kernels ------------------------------------------------------------------------


class Result(NamedTuple):
    """An array for a product's result, and its strides along batch axes, rows and columns."""

    data: Any
    batch: tuple[Any, ...]
    row: Any
    column: Any


class Factor(NamedTuple):
    """A factor of a product and its strides, also along its own rows (of b: columns) and along the sum."""

    data: Any
    batch: tuple[Any, ...]
    outer: tuple[Any, ...]
    row: Any
    depth: Any


class Bias(NamedTuple):
    """The row that is added to every row of a product, and its stride."""

    data: Any
    stride: Any


class Sizes(NamedTuple):
    """The sizes of a product."""

    batches: tuple[Any, ...]  # sizes of the result's batch axes, at least one
    outers: tuple[Any, ...]  # sizes of the batch axes that the sum goes over, at least one
    B: Any  # matrices of the result
    rounds: Any  # matrix products that are summed to an element
    M: Any
    N: Any
    K: Any


def arguments(given: Product) -> tuple[Result, Result, Factor, Factor, Bias, Sizes]:
    """Return y, z, a, b, bias and sizes, the arguments of the kernels that load by strides."""
    nothing = Axis(1)
    batch, outer = given.batch or (nothing,), given.outer or (nothing,)
    y, z, a, b, bias = given.names
    m, n, k = given.m, given.n, given.k
    batch_sizes, outer_sizes = (tuple(axis.size for axis in axes) for axes in (batch, outer))
    return (
        Result(y, tuple(axis.y for axis in batch), m.y, n.y),
        Result(z, tuple(axis.z for axis in batch), m.z, n.z),
        Factor(a, tuple(axis.a for axis in batch), tuple(axis.a for axis in outer), m.a, k.a),
        Factor(b, tuple(axis.b for axis in batch), tuple(axis.b for axis in outer), n.b, k.b),
        Bias(bias, given.bias_stride),
        Sizes(batch_sizes, outer_sizes, given.batches, given.rounds, m.size, n.size, k.size),
    )


class Variant(NamedTuple):
    """The compile-time values of kernels, in addition to their Config and the Reading of each factor."""

    dtype: str
    bias_dtype: str | None = None
    activation: str | None = None
    preactivation: bool = False  # whether the preactivation is a result, too
    batch_axes: int = 1
    outer_axes: int = 0

    @property
    def has_bias(self) -> bool:
        return self.bias_dtype is not None

    @property
    def has_rounds(self) -> bool:
        """Whether an element of the result may be the sum of several products of matrices."""
        return self.outer_axes > 0


def variant(given: Product, p: Problem) -> Variant:
    """Return the compile-time values for this product. Gradients have no activation."""
    forward = given.names[0] == "y"
    return Variant(
        p.dtype,
        p.dtype_of("bias") if given.names[4] else None,
        p.activation if forward else None,
        bool(given.names[1]),
        max(len(given.batch), 1),
        len(given.outer),
    )


def argument_types(found: Variant) -> tuple[Any, ...]:
    """Return the types of `arguments`."""
    array = pointer(storage(found.dtype).element)
    axes = product_axes(found)
    batch, outer = axes.batch.type, axes.outer.type
    factor = types.NamedTuple((array, batch, outer, i64, i64), Factor)
    sizes = types.NamedTuple((batch, outer, *[i64] * 5), Sizes)
    return (*[result_type(found, batch)] * 2, factor, factor, bias_type(found), sizes)


def result_type(found: Variant, batch: Any) -> Any:
    """Return the type of a Result. batch: that of its strides along batch axes."""
    return types.NamedTuple((pointer(storage(found.dtype).element), batch, i64, i64), Result)


def bias_type(found: Variant) -> Any:
    """Return the type of a Bias."""
    return types.NamedTuple((pointer(storage(found.bias_dtype or found.dtype).element), i64), Bias)


@kept_noun
def axes_of(count: int) -> Members:
    """The verb for `count` axes that arrays share, whose elements are numbered in row-major order."""
    LAST = count - 1

    @verb
    def at(index, sizes, strides):
        """Return the offset of element number `index`."""
        if count == 1:
            return index * strides[0]
        total = i64(0)
        for axis in range(count):
            total += index % sizes[LAST - axis] * strides[LAST - axis]
            index = index // sizes[LAST - axis]
        return total

    @verb
    def at_32(index, sizes, strides):
        """Return the same for a number below 2**32: a 64-bit division is a call and takes registers."""
        if count == 1:
            return i64(u32(index)) * strides[0]
        total, rest = i64(0), u32(index)
        for axis in range(count):
            size = u32(sizes[LAST - axis])
            total += i64(rest % size) * strides[LAST - axis]
            rest = rest // size
        return total

    return members(locals(), type=types.UniTuple(i64, count))  # of their sizes, and of an array's strides along them


@noun
def product_axes(found: Variant) -> Members:
    """The verbs that compute where the matrices of a product begin, along batch and outer axes."""
    return members(locals(), batch=axes_of(found.batch_axes), outer=axes_of(max(found.outer_axes, 1)))
