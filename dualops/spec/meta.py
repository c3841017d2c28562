"""Metadata of arrays: dtypes by name, shapes, strides, addresses; never values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .domains import finite, integer, shown

FLOATS = ("float64", "float32", "float16", "bfloat16")
# a quarter of the largest number; in float64 a number whose square is finite
HUGE = {"float16": 16376.0, "bfloat16": 2.0**125, "float32": 2.0**125, "float64": 2.0**500}
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("bfloat16",)} | {
    name: np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")
}


def numpy_dtype(name: str) -> np.dtype:
    """Return NumPy's dtype for a dualops dtype name (`"bfloat16"` comes from ml_dtypes)."""
    return _DTYPES[name]


def itemsize(name: str) -> int:
    """Return the bytes of one element of dtype `name`."""
    return _DTYPES[name].itemsize


def compute_dtype(name: str) -> str:
    """Return the dtype of arithmetic and statistics: float64 for float64, float32 for all else."""
    return "float64" if name == "float64" else "float32"


def in_elements(strides: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """Convert strides from bytes to elements of `nbytes` bytes. Raises ValueError if they are not whole elements."""
    if any(stride % nbytes for stride in strides):
        raise ValueError(f"strides are {tuple(strides)} bytes, expected multiples of the {nbytes} of an element")
    return tuple(stride // nbytes for stride in strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_strides_like(shape: Sequence[int], like: ArrayMeta) -> tuple[int, ...]:
    """Return strides of a dense array of `shape` with the memory order of `like`'s axes (torch's `empty_like`)."""
    if tuple(shape) == like.shape and like.is_dense:
        return like.strides
    inner_first = list(reversed(range(len(shape))))
    for end in range(1, len(shape)):  # an insertion sort: a broadcast axis can't be compared, and stays in place
        place = end
        for before in reversed(range(end)):
            inner, outer = inner_first[before], inner_first[place]
            apart = like.strides[inner] - like.strides[outer] if like.strides[inner] and like.strides[outer] else None
            if apart is not None and apart < 0:
                break
            if apart is not None and (apart > 0 or like.shape[inner] > like.shape[outer]):
                inner_first[before], inner_first[place] = outer, inner
                place = before
    strides, step = [0] * len(shape), 1
    for axis in inner_first:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Count the elements from the first to the last in memory, including gaps (strides are not negative)."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class ArrayMeta(NamedTuple):
    """All that a spec and a launch need to know of an array, without its values."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]  # in elements
    device: str  # "cpu", "cuda:0", "meta" ...
    pointer: int | float  # address of element 0, or 0 without one; for a number on the host its value
    read_only: bool = False  # its library forbids writing: it can't be a result

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> ArrayMeta:
        """Describe a NumPy array. Raises ValueError for strides of no whole elements (a field of a record array)."""
        strides = in_elements(array.strides, array.itemsize)
        dtype = array.dtype.name if array.dtype.isnative else array.dtype.str  # ">f4" is not a supported dtype
        return cls(array.shape, dtype, strides, "cpu", array.ctypes.data, not array.flags.writeable)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Count the elements from the first to the last in memory, including gaps (strides are not negative)."""
        return extent(self.shape, self.strides)

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their extent without gaps or overlaps, in any order of axes; true if empty."""
        if 0 in self.shape:
            return True
        step = 1
        for size, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda axis: axis[1]):
            if size > 1:
                if stride != step:
                    return False
                step *= size
        return True

    @property
    def is_row_major(self) -> bool:
        """Whether the elements are row-major without gaps; an axis of size 1 may have any stride."""
        dense = contiguous_strides(self.shape)
        return all(size == 1 or mine == own for size, mine, own in zip(self.shape, self.strides, dense, strict=True))

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share a place: some axis has a stride within the reach of the axes inside it."""
        if 0 in self.shape:
            return False
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False

    @property
    def nbytes(self) -> int:
        """Return the bytes from the first element to the end of the last."""
        return self.extent * itemsize(self.dtype)


class Strided(NamedTuple):
    """An array argument of a kernel: its name (at the launch, its memory), and its strides in elements."""

    data: Any
    strides: tuple[Any, ...]


def check_plain(array: np.ndarray, op: str, name: str) -> None:
    """Raise TypeError for an array type with arithmetic of its own: np.matrix, a masked array."""
    kind = type(array)
    if kind is np.ndarray or kind is np.memmap:
        return
    maker = "its method filled" if isinstance(array, np.ma.MaskedArray) else "np.asarray"
    raise TypeError(
        f"{op}: {name} is a {kind.__module__}.{kind.__qualname__}, expected a plain numpy.ndarray, as {maker} makes one"
    )


def take_turns(one: ArrayMeta, other: ArrayMeta) -> bool:
    """Whether two arrays with overlapping extents lie in each other's gaps, as q and k of one projection do.

    Each stride is tried as the length of a row; False if none separates them.
    """
    both = [
        (meta.pointer, size, [(n - 1, step * size) for n, step in zip(meta.shape, meta.strides) if n > 1])
        for meta, size in ((one, itemsize(one.dtype)), (other, itemsize(other.dtype)))
    ]
    for row in {step for _, _, axes in both for _, step in axes if step}:
        (mine, my_reach), (theirs, their_reach) = (
            (pointer, size + sum(last * step for last, step in axes if step % row)) for pointer, size, axes in both
        )
        if (theirs - mine) % row >= my_reach and (mine - theirs) % row >= their_reach:
            return True
    return False


def number_meta(value: Any, op: str, name: str, dtypes: Sequence[str] = ("int64",)) -> ArrayMeta:
    """Describe a number on the host: a 64-bit integer or, for float `dtypes`, a finite float. Its "address" is its
    value.
    """
    if dtypes[0] in FLOATS:
        return _float_meta(value, op, name)
    try:
        number = integer(value)
    except TypeError:
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, expected an integer, or an array without axes"
        ) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {name} is {shown(number)}, expected an integer of 64 bits")
    return ArrayMeta((), "int64", (), "host", number)


def _float_meta(value: Any, op: str, name: str) -> ArrayMeta:
    try:
        number = finite(value)
    except TypeError:
        raise TypeError(
            f"{op}: {name} is a {type(value).__name__}, expected a number, or an array without axes"
        ) from None
    except ValueError:
        raise ValueError(f"{op}: {name} is {shown(value)}, expected a finite number") from None
    return ArrayMeta((), "float64", (), "host", number)
