"""Which products can be loaded and stored as boxes, and their tensor maps.

A factor is loaded as boxes if one of its two axes is contiguous and all its other strides are multiples of 16 bytes.
Other rungs compute the other products. Its map has the contiguous axis, the other one, and the inner batch axis. If
there are two batch axes, or an element is the sum of several products, the map also has the outer batch axis and the
outer axis. An array that is broadcast along an axis has size 1 and coordinate 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....spec import ArrayMeta
from ....spec.meta import itemsize
from ...launch.tensor_map import Mapped
from ...tile.swizzle import Operand
from ..product import Axis, Product

MULTIPLE = 16  # bytes
MOST = 2**31 - 2**10  # size of an axis: coordinates of a tile that begins in it have 32 bits
MOST_BYTES = 2**40  # stride along an axis


class FactorBoxes(NamedTuple):
    """A factor that is loaded as boxes."""

    name: str
    major: str  # "k" or "mn": the contiguous axis
    lines: Axis  # the other axis of the matrix
    along: Axis  # the contiguous axis
    others: tuple[tuple[int, int], ...]  # sizes and strides of the other axes
    steps: tuple[int, ...]  # for each of the other axes 1, or 0 if the factor is broadcast along it

    def mapped(self, dtype: str, box: tuple[int, int], span: int, which: str) -> Mapped:
        """Return the tensor map. which: "a" or "b"."""
        axes = [*reversed(self.others), *((axis.size, getattr(axis, which)) for axis in (self.lines, self.along))]
        sizes, strides = zip(*axes, strict=True)
        return Mapped(self.name, dtype, sizes, strides, (*(1 for _ in self.others), *box), span)


def other_axes(product: Product) -> tuple[Axis, ...] | None:
    """Return one or three axes for maps in addition to rows, columns and the sum; None if there are too many."""
    if len(product.batch) > 2 or len(product.outer) > 1:
        return None
    inner, outer = (*reversed(product.batch), Axis(1), Axis(1))[:2]
    if len(product.batch) < 2 and not product.outer:
        return (inner,)
    return (inner, outer, *(product.outer or (Axis(1),)))


def factor_boxes(product: Product, which: str, metas: Mapping[str, ArrayMeta]) -> FactorBoxes | None:
    """Return how factor "a" or "b" is loaded as boxes; None if it can't be."""
    own, others = product.m if which == "a" else product.n, other_axes(product)
    name = product.names[2 if which == "a" else 3]
    if others is None or metas[name].pointer % 16:
        return None
    nbytes = itemsize(metas[name].dtype)
    around = tuple((axis.size, getattr(axis, which)) for axis in others)
    steps = tuple(int(bool(size > 1 and stride > 0)) for size, stride in around)
    there = tuple((size if step else 1, stride) for (size, stride), step in zip(around, steps, strict=True))
    for major, along, lines in (("k", product.k, own), ("mn", own, product.k)):
        axes = ((lines.size, getattr(lines, which)), *there)
        contiguous = along.size == 1 or getattr(along, which) == 1
        if contiguous and along.size <= MOST and all(_steps_by_boxes(*axis, nbytes) for axis in axes):
            return FactorBoxes(name, major, lines, along, there, steps)
    return None


def _steps_by_boxes(size: int, stride: int, nbytes: int) -> bool:
    """Whether a map can have an axis of this size and stride, if it is not contiguous. nbytes: bytes per element."""
    stride *= nbytes
    return size == 1 or bool(size <= MOST and 0 < stride < MOST_BYTES and stride % MULTIPLE == 0)


def result_mapped(product: Product, which: str, metas: Mapping[str, ArrayMeta], box: tuple[int, int]) -> Mapped | None:
    """Return the map by which result "y" or "z" is stored as boxes; None if it can't be.

    Rows must be multiples of 16 bytes: the last 16 bytes of a row are stored as a whole.
    """
    name, others = product.names["yz".index(which)], other_axes(product)
    if others is None or metas[name].pointer % 16:
        return None
    nbytes = itemsize(metas[name].dtype)
    around = [(axis.size, getattr(axis, which)) for axis in others[:2]]
    rows, columns = ((axis.size, getattr(axis, which)) for axis in (product.m, product.n))
    whole = columns[0] * nbytes % MULTIPLE == 0 and columns[1] == 1
    if not whole or not all(_steps_by_boxes(*axis, nbytes) for axis in (rows, *around)):
        return None
    sizes, strides = zip(*reversed(around), rows, columns, strict=True)
    return Mapped(name, metas[name].dtype, sizes, strides, (*(1 for _ in around), *box), nbytes * box[1])


def tile_of(major: str, rows: int, depth: int, nbytes: int = 2) -> Operand:
    """Return a factor's tile in shared memory: `rows` of its rows (of b: columns), and `depth` steps of the sum.

    nbytes: bytes per element.
    """
    lines, width = (rows, depth) if major == "k" else (depth, rows)
    return Operand(lines, width, nbytes, min(128, nbytes * width), major)
