"""A call of rms_norm or layer_norm: the compile-time values of its kernels, their arguments, and the verbs that read
these: statistics of rows, and weights as numbers. `row_walk` computes the addresses of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ...spec.meta import compute_dtype, contiguous_strides
from ..compiler.backend import Members, i32, i64, kept_noun, members, pointer, types, verb
from ..launch.step import Argument
from ..launch.views import number_type, strided
from ..row_walk import row_axes, walk
from ..rows.operator import RowArrays, Rows, arrays_type, rows_type
from ..tile.numbers import numbers
from ..tile.storage import access, storage

STATISTICS = frozenset({"mean", "rstd"})
VECTORS = ("w", "b", "dw", "db")


@dataclass(frozen=True)
class Variant:
    """The compile-time values of a kernel, in addition to its Config. eps and offset are launch arguments."""

    dtype: str  # of x
    centred: bool  # whether the mean is subtracted first: layer_norm
    rank: int  # axes along which rows lie
    w: str | None  # dtype of the weights
    b: str | None = None
    added: bool = False  # forward: residual and summed; backward: dsummed
    statistics: bool = False  # forward: whether rstd, and mean, are results
    dw: bool = False
    db: bool = False
    backward: bool = False

    @cached_property
    def staged(self) -> int:
        """Return the number of arrays in a stage of a ring."""
        return 1 + self.backward + self.added

    @cached_property
    def weight_gradients(self) -> int:
        """Return how many of dw and db are requested."""
        return self.dw + self.db


class Params(NamedTuple):
    """Forward's arguments that are not arrays of rows; null pointers for missing ones. The residual is the other
    input."""

    mean: Any  # [M], a result: only layer_norm
    rstd: Any  # [M], a result
    w: Any  # [N]
    b: Any  # [N]
    eps: Any
    offset: Any  # added to w


class GradientInputs(NamedTuple):
    """The inputs of the gradient."""

    x: Any  # [M, N]
    mean: Any  # [M]: only layer_norm
    rstd: Any  # [M]
    dy: Any  # [M, N]
    dsummed: Any  # [M, N]
    w: Any  # [N]


def forward_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of `RowArrays`, `Params` and `Rows`."""
    return arrays_type(variant.dtype, variant.rank), params_type(variant), rows_type(variant.rank)


def params_type(variant: Variant) -> Any:
    """Return the type of `Params`."""
    statistic, number = number_type(variant.dtype, variant.rank), storage(variant.dtype).number
    w, b = (pointer(storage(dtype or variant.dtype).element) for dtype in (variant.w, variant.b))
    return types.NamedTuple((statistic, statistic, w, b, number, number), Params)


def backward_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of dx, partials, `GradientInputs`, `Rows`, offset and slots."""
    number = storage(variant.dtype).number
    return array_type(variant), pointer(number), *gradient_types(variant), number, i64


def gradient_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of `GradientInputs` and `Rows`."""
    data, statistic = array_type(variant), number_type(variant.dtype, variant.rank)
    fields = (data, statistic, statistic, data, data, pointer(storage(variant.w or variant.dtype).element))
    return types.NamedTuple(fields, GradientInputs), rows_type(variant.rank)


def array_type(variant: Variant) -> Any:
    """Return the type of x, and of every array of its shape."""
    return strided(variant.dtype, variant.rank)


class Call:
    """A problem with its results. args: (arrays, params, rows); backward: (inputs, rows, offset)."""

    def __init__(self, problem: Problem, results: Mapping[str, ArrayMeta], *, backward: bool):
        # backward does not read b
        arrays = {name: meta for name, meta in problem.arrays.items() if not (backward and name == "b")}
        metas = {**results, **arrays}
        self.M, self.N, self.dtype = problem.M, problem.N, problem.dtype
        self.device = problem.arrays["x"].device
        self.sums_dtypes = [results[name].dtype if name in results else None for name in ("dw", "db")]
        walked = walk({name: meta for name, meta in metas.items() if name not in VECTORS}, STATISTICS)
        self.variant = Variant(
            dtype=self.dtype,
            centred=problem.spec.name == "layer_norm",
            rank=walked.rank,
            w=arrays["w"].dtype if "w" in arrays else None,
            b=arrays["b"].dtype if "b" in arrays else None,
            added=("dsummed" if backward else "residual") in arrays,
            statistics="rstd" in results,
            dw="dw" in results,
            db="db" in results,
            backward=backward,
        )
        self.aligned = self._aligned(metas, [walked.rows[name].strides for name in walked.rows.keys() - STATISTICS])
        offset = problem.params.get("offset", 0.0)
        rows = Rows(self.M, self.N, walked.sizes)
        if backward:
            self.dx = walked.of("dx")[0]
            inputs = GradientInputs(*walked.of("x", "mean", "rstd", "dy", "dsummed"), w="w")
            self.args: tuple[Argument, ...] = (inputs, rows, offset)
        else:
            params = Params(*walked.of("mean", "rstd"), w="w", b="b", eps=problem.eps, offset=offset)
            self.args = (RowArrays(*walked.of("y", "summed", "x", "residual")), params, rows)

    def _aligned(self, metas: Mapping[str, ArrayMeta], strides: list[tuple[int, ...]]) -> bool:
        """Return whether every row begins at a multiple of 16 bytes and has whole 16-byte vectors."""
        vector = storage(self.dtype).vector
        return (
            self.N % vector == 0
            and all(step % vector == 0 for steps in strides for step in steps)
            and all(meta.pointer % 16 == 0 for name, meta in metas.items() if name not in STATISTICS)
        )

    def partials_args(self, slots: int) -> tuple[Argument, ...]:
        """Return the arguments of a kernel that writes dx, and sums for dw and db to `slots` slots."""
        return (self.dx, "partials", *self.args, slots)

    def numbers(self, *shape: int) -> ArrayMeta:
        """Return the metadata of an array in the dtype of arithmetic."""
        return ArrayMeta(shape, compute_dtype(self.dtype), contiguous_strides(shape), self.device, 0)


# --- verbs -----------------------------------------------------------------------------------------


@kept_noun
def norm_axes(variant: Variant) -> Members:
    """The verbs that find rows in memory, and read and write their statistics."""
    mem, num = storage(compute_dtype(variant.dtype)), numbers(storage(variant.dtype).number)
    axes = row_axes(variant.rank)

    @verb
    def statistics(place, inputs):
        """Return the row's mean (0 for rms_norm) and rstd."""
        row_mean, row_rstd = num.zero, mem.load(inputs.rstd.data, axes.start(place, inputs.rstd))
        if variant.centred:
            row_mean = mem.load(inputs.mean.data, axes.start(place, inputs.mean))
        return row_mean, row_rstd

    @verb
    def write_statistics(place, params, row_mean, row_rstd):
        mem.store(params.rstd.data, axes.start(place, params.rstd), row_rstd)
        if variant.centred:
            mem.store(params.mean.data, axes.start(place, params.mean), row_mean)

    return members(locals(), **axes.members())


@kept_noun
def weights(variant: Variant, aligned: bool) -> Members:
    """The verbs that load w and b, in the variant's dtypes, for one access to x; zeros if keep is false.

    If a call has no w or no b, nothing is loaded for it.
    """
    load_w, load_b = (_loads(variant.dtype, dtype, aligned) for dtype in (variant.w, variant.b))
    count = access(variant.dtype, aligned).vector

    @verb
    def load_w_plus(frag, at, w, index, keep, offset):
        """Load w + offset."""
        if variant.w is not None:
            load_w(frag, at, w, index, keep)
            for c in range(at, at + count):
                frag[c] += offset

    @verb
    def smem():
        """Return nothing: w and b are not in shared memory (`shared_weights`)."""
        return i32(0)

    @verb
    def load(w_frag, b_frag, waiting, params, column, inside):
        """Load w + offset and b of an access to x."""
        load_w_plus(w_frag, 0, params.w, column, inside, params.offset)
        load_b(b_frag, 0, params.b, column, inside)

    return members(
        locals(),
        load_w=load_w,  # (frag, at, w, index, keep)
        load_b=load_b,  # (frag, at, b, index, keep)
    )


def _loads(dtype: str, weights_dtype: str | None, aligned: bool) -> Callable[..., None]:
    """Return the verb (frag, at, w, index, keep) for weights of weights_dtype with an x of dtype."""
    mem, num = storage(weights_dtype or dtype), numbers(storage(dtype).number)
    count = access(dtype, aligned).vector

    @verb
    def load_none(frag, at, w, index, keep):
        pass

    @verb
    def load_vectors(frag, at, w, index, keep):
        for c in range(0, count, mem.vector):
            mem.load_vector(frag, at + c, w, index + c, keep, num.zero)

    @verb
    def load_one(frag, at, w, index, keep):
        frag[at] = num.zero
        if keep:
            frag[at] = mem.load(w, index)

    if weights_dtype is None:
        return load_none
    return load_vectors if aligned else load_one
