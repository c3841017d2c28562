"""The compile-time values of matmul's sm90 kernels, and their arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...compiler.backend import Members, i32, i64, noun, tensor_map, types, u32, verb
from ..product import Bias, Result, Variant, bias_type, result_type
from ..tiled import Results


class Sm90Variant(NamedTuple):
    """A kernel's compile-time values in addition to its Config. a, b: each factor's contiguous axis, "k" or "mn"."""

    product: Variant
    a: str
    b: str
    others: int  # axes of a factor's map in addition to its own two
    out: int  # elements of a result's row per store; 0 if results are stored as boxes
    parts: bool = False  # whether factors are parts of float32 (`parts`)

    @property
    def short(self) -> bool:
        """Return whether results have 16 bits."""
        return self.product.dtype != "float32"

    @property
    def result_axes(self) -> int:
        """Return the number of axes of the results' maps in addition to rows and columns."""
        return min(self.others, 2)


class Extent(NamedTuple):
    """The sizes of a product. A factor's steps: 1 for each other axis of its map, or 0 if it is broadcast along it."""

    batches: Any
    inner: Any  # size of the inner batch axis
    rounds: Any  # matrix products that are summed to an element
    M: Any
    N: Any
    K: Any
    a_steps: tuple[Any, ...]
    b_steps: tuple[Any, ...]


@noun
def other_coordinates(others: int) -> Members:
    """The verbs that compute coordinates along a map's axes other than rows and columns."""

    @verb
    def factor(extent, steps, batch, r):
        """Return a factor's coordinates, for product number r."""
        if others == 1:
            return (i32(batch) * steps[0],)
        inner, outer = i32(u32(batch) % u32(extent.inner)), i32(u32(batch) // u32(extent.inner))
        return (inner * steps[0], outer * steps[1], i32(r) * steps[2])

    @verb
    def result(extent, batch):
        """Return the results' coordinates."""
        if others == 1:
            return (i32(batch),)
        return (i32(u32(batch) % u32(extent.inner)), i32(u32(batch) // u32(extent.inner)))

    return locals()


class To(NamedTuple):
    """The destination of a product: its maps, or arrays with their strides, and the bias."""

    y_map: Any
    z_map: Any
    y: Result
    z: Result
    bias: Bias


def _to_type(found: Sm90Variant) -> Any:
    product = found.product
    y_map = i64 if found.out else tensor_map  # 0 without a map
    z_map = y_map if product.preactivation else i64
    result = result_type(product, types.UniTuple(i64, found.result_axes))
    return types.NamedTuple((y_map, z_map, result, result, bias_type(product)), To)


def argument_types(found: Sm90Variant) -> tuple[Any, ...]:
    """Return the types of a_map, b_map, to and extent."""
    extent = types.NamedTuple((*[i32] * 6, *[types.UniTuple(i32, found.others)] * 2), Extent)
    return (tensor_map, tensor_map, _to_type(found), extent)


@verb
def results_of(to, corner, N):
    """Return the Results, stored row by row, of the matrix in which a tile begins at `corner`."""
    return Results(to.y, to.z, _begin(to.y, corner.others), _begin(to.z, corner.others), to.bias, N)


@verb
def _begin(result, coordinates):
    """Return the index at which the matrix with these coordinates along the batch axes begins."""
    at = i64(0)
    for axis in range(len(coordinates)):
        at += coordinates[axis] * result.batch[axis]
    return at
