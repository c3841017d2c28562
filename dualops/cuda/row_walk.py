"""Addresses of rows in arrays of any layout, with as few axes as all arrays of a call allow.

    walked = walk({"y": y, "x": x})                              # on the host: sizes of the axes, strides of each array
    Step(kernel, (M,), (*walked.of("y", "x"), walked.sizes))

    axes = row_axes(rank)                                        # in the kernel
    place = axes.place()
    axes.locate(place, row, sizes)
    x_row = axes.start(place, x)                                 # then x.data[x_row + n]

An array is a `Strided` with its strides between rows, of type `views.strided(dtype, rank)`. A missing array is a null
pointer. A kernel that is built for such calls never reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..spec import ArrayMeta
from ..spec.meta import Strided
from .compiler.backend import Members, cuda, i64, kept_noun, verb
from .launch.arrays import collapse
from .launch.views import absent


class Walk(NamedTuple):
    """The layout of a call's arrays: the fewest axes that describe the rows of all of them."""

    sizes: tuple[int, ...]  # of the axes
    rows: Mapping[str, Strided]

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def of(self, *names: str) -> tuple[Strided, ...]:
        """Return the arrays as arguments; null pointers for missing ones."""
        return tuple(self.rows.get(name, absent(self.rank)) for name in names)


def walk(metas: Mapping[str, ArrayMeta], numbers: Collection[str] = ()) -> Walk:
    """Return the Walk of arrays [..., N] of one shape and of arrays [...] with a number for each row."""
    strides = [meta.strides if name in numbers else meta.strides[:-1] for name, meta in metas.items()]
    shape = next(meta.shape[:-1] for name, meta in metas.items() if name not in numbers)
    sizes, merged = collapse(shape, *strides)
    if not sizes:
        sizes, merged = (1,), [(0,)] * len(metas)
    return Walk(sizes, {name: Strided(name, steps) for name, steps in zip(metas, merged, strict=True)})


@kept_noun
def row_axes(rank: int) -> Members:
    """The verbs that compute the addresses of rows along `rank` axes."""

    @verb
    def place():
        """Return a local array for a row's index along each axis."""
        return cuda.local.array(rank, i64)

    @verb
    def locate(place, row, sizes):
        """Compute these indices."""
        for axis in range(rank - 1, 0, -1):
            place[axis] = row % sizes[axis]
            row //= sizes[axis]
        place[0] = row

    @verb
    def start(place, x):
        """Return the index of the row's first element in a strided array."""
        offset = place[0] * x.strides[0]
        for axis in range(1, rank):
            offset += place[axis] * x.strides[axis]
        return offset

    return locals()
