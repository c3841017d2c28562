"""What the kernels of rms_norm and layer_norm are built for, and the arguments that they share.

Rows are walked as `row_walk` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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


def forward_types(variant: Variant) -> tuple[Any, ...]:
    """(y, summed, mean, rstd, x, residual, w, b, M, N, sizes, eps, offset)."""
    data, statistic = strided(variant.dtype, variant.rank), number_type(variant.dtype, variant.rank)
    number = storage(variant.dtype).number
    vectors = [pointer(storage(dtype or variant.dtype).element) for dtype in (variant.w, variant.b)]
    sizes = types.UniTuple(i64, variant.rank)
    return data, data, statistic, statistic, data, data, *vectors, i64, i32, sizes, number, number


def backward_types(variant: Variant) -> tuple[Any, ...]:
    """(dx, partials, x, mean, rstd, dy, dsummed, w, M, N, sizes, offset, slots)."""
    data, statistic = strided(variant.dtype, variant.rank), number_type(variant.dtype, variant.rank)
    number = storage(variant.dtype).number
    vector = pointer(storage(variant.w or variant.dtype).element)
    sizes = types.UniTuple(i64, variant.rank)
    return data, pointer(number), data, statistic, statistic, data, data, vector, i64, i32, sizes, number, i64
