"""What the kernels of rms_norm and layer_norm are built for, and the arguments that they share.

An array whose rows a kernel walks comes with its strides between rows; one that a call does not have comes as a null
pointer, and the kernel that is built for such calls never looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...spec import ArrayMeta
from ...spec.meta import Strided
from ..arrays import collapse
from ..backend import i32, i64, pointer, types
from ..tile.storage import storage
from ..views import absent, number_type, strided

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

    @property
    def staged(self) -> int:
        """Arrays in a stage of a ring."""
        return 1 + self.backward + self.added

    @property
    def sums(self) -> int:
        """Vectors that are summed over all rows."""
        return self.dw + self.db


class Walk(NamedTuple):
    """How the arrays of a call lie: M rows along the fewest axes that do for all of them."""

    sizes: tuple[int, ...]  # of the axes
    rows: Mapping[str, Strided]

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def of(self, *names: str) -> tuple[Strided, ...]:
        """The arguments; null pointers for what the call does not have."""
        return tuple(self.rows.get(name, absent(self.rank)) for name in names)


def walk(metas: Mapping[str, ArrayMeta]) -> Walk:
    """How to walk x [..., N], arrays of its shape, and statistics [...]."""
    shape = metas["x"].shape[:-1]
    strides = [meta.strides if name in STATISTICS else meta.strides[:-1] for name, meta in metas.items()]
    sizes, merged = collapse(shape, *strides)
    if not sizes:
        sizes, merged = (1,), [(0,)] * len(metas)
    return Walk(sizes, {name: Strided(name, steps) for name, steps in zip(metas, merged, strict=True)})


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
