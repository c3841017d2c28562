"""The compile-time values of the kernels of rms_norm and layer_norm, and the arguments that they share.

`row_walk` computes the addresses of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..compiler.backend import i64, pointer, types
from ..launch.views import number_type, strided
from ..rows.operator import arrays_type, rows_type
from ..tile.storage import storage

STATISTICS = frozenset({"mean", "rstd"})


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
    statistic, number = _statistic_type(variant), storage(variant.dtype).number
    w, b = (_vector_type(variant, dtype) for dtype in (variant.w, variant.b))
    return types.NamedTuple((statistic, statistic, w, b, number, number), Params)


def backward_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of dx, partials, `GradientInputs`, `Rows`, offset and slots."""
    number = storage(variant.dtype).number
    return array_type(variant), pointer(number), *gradient_types(variant), number, i64


def gradient_types(variant: Variant) -> tuple[Any, ...]:
    """Return the types of `GradientInputs` and `Rows`."""
    data, statistic = array_type(variant), _statistic_type(variant)
    fields = (data, statistic, statistic, data, data, _vector_type(variant, variant.w))
    return types.NamedTuple(fields, GradientInputs), rows_type(variant.rank)


def array_type(variant: Variant) -> Any:
    """Return the type of x, and of every array of its shape."""
    return strided(variant.dtype, variant.rank)


def _statistic_type(variant: Variant) -> Any:
    return number_type(variant.dtype, variant.rank)


def _vector_type(variant: Variant, dtype: str | None) -> Any:
    return pointer(storage(dtype or variant.dtype).element)
