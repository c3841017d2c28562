"""What the kernels of rms_norm and layer_norm are built for, and the arguments that they share.

Rows are walked as `row_walk` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..compiler.backend import i32, i64, pointer, types
from ..launch.views import number_type, strided
from ..tile.storage import storage

STATISTICS = frozenset({"mean", "rstd"})


@dataclass(frozen=True)
class Variant:
    """What a kernel is built for, beside its Config. eps and offset are numbers of the launch."""

    dtype: str  # of x
    centred: bool  # the mean is taken away first: layer_norm
    rank: int  # axes along which rows lie
    w: str | None  # dtype of the weights
    b: str | None = None
    added: bool = False  # forward: residual and summed; backward: dsummed
    statistics: bool = False  # forward: rstd, and mean, are results
    dw: bool = False
    db: bool = False
    backward: bool = False

    @cached_property
    def staged(self) -> int:
        """Arrays in a stage of a ring."""
        return 1 + self.backward + self.added

    @cached_property
    def weight_gradients(self) -> int:
        """How many of dw and db are wanted."""
        return self.dw + self.db


class Results(NamedTuple):
    """Where forward writes. Arrays with their strides; null pointers where there are none."""

    y: Any  # M rows of N columns
    summed: Any  # x + residual, as y
    mean: Any  # a number of each row
    rstd: Any


class Given(NamedTuple):
    """What forward reads. x and residual: M rows of N columns, with their strides. w and b [N]."""

    x: Any
    residual: Any
    w: Any
    b: Any


class Work(NamedTuple):
    """How large a forward call is, and its numbers."""

    M: Any
    N: Any
    sizes: Any  # of the axes along which the M rows lie
    eps: Any
    offset: Any  # added to w


class BackwardGiven(NamedTuple):
    """What backward reads. x, dy, dsummed: M rows of N columns. mean, rstd: a number of each row. w [N]."""

    x: Any
    mean: Any
    rstd: Any
    dy: Any
    dsummed: Any
    w: Any


class BackwardWork(NamedTuple):
    """How large a backward call is, and its number. Fields as those of Work."""

    M: Any
    N: Any
    sizes: Any
    offset: Any


def forward_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of Results, Given and Work."""
    data, statistic = strided(variant.dtype, variant.rank), number_type(variant.dtype, variant.rank)
    number = storage(variant.dtype).number
    vectors = [pointer(storage(dtype or variant.dtype).element) for dtype in (variant.w, variant.b)]
    sizes = types.UniTuple(i64, variant.rank)
    return (
        types.NamedTuple((data, data, statistic, statistic), Results),
        types.NamedTuple((data, data, *vectors), Given),
        types.NamedTuple((i64, i32, sizes, number, number), Work),
    )


def backward_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of dx, partials, BackwardGiven, BackwardWork and slots, the room of partials."""
    data, statistic = strided(variant.dtype, variant.rank), number_type(variant.dtype, variant.rank)
    number = storage(variant.dtype).number
    vector = pointer(storage(variant.w or variant.dtype).element)
    sizes = types.UniTuple(i64, variant.rank)
    given = types.NamedTuple((data, statistic, statistic, data, data, vector), BackwardGiven)
    return data, pointer(number), given, types.NamedTuple((i64, i32, sizes, number), BackwardWork), i64
