"""Hostile memory: it starts as NaN, and nothing outside an array is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import index as as_int
from typing import Any, NoReturn

import greenlet
import numpy as np


class Pointer:
    """A flat typed array as a kernel sees it: `p[i]` is one element, and an access outside raises IndexError.

    `name` is used in error messages; `key` finds the same shared array in another block of the cluster.
    """

    __slots__ = ("address", "bytes", "data", "itemsize", "key", "name", "size")

    def __init__(self, data: np.ndarray, name: str, key: Any = None):
        self.data, self.name, self.size, self.key = data, name, data.size, key
        self.address, self.itemsize = data.ctypes.data, data.itemsize
        self.bytes = data.view(np.uint8).data

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            self.astray("read", index)
        return self.data[index]

    def __setitem__(self, index: int, value: Any) -> None:
        if not 0 <= index < self.size:
            self.astray("written", index)
        self.data[index] = value

    def vector(self, index: int, count: int) -> np.ndarray:
        """Return a view of `count` adjacent elements. Their address must be a multiple of their size."""
        first = self.first(index, count)
        return self.data[first : first + count]

    def first(self, index: int, count: int) -> int:
        """Return the index of the first of these elements, as a Python int."""
        if type(index) is not int:
            index = as_int(index)  # with a NumPy int, the address would wrap
        if index < 0 or index + count > self.size:
            self.astray(f"accessed as {count} elements", index)
        if (self.address + index * self.itemsize) % (count * self.itemsize):
            raise IndexError(f"{self.name}[{index}] is not aligned to {count * self.itemsize} bytes")
        return index

    def astray(self, what: str, index: int) -> NoReturn:
        raise _astray(self.name, what, index, self.size)


class Local:
    """A thread's local array, used like a Pointer. It is a list of NumPy numbers, which is faster than an array."""

    # watch: for arrays that products of a warpgroup use, see `warpgroup`
    __slots__ = ("kind", "make", "values", "watch")

    def __init__(self, size: int, kind: Any, make: Callable[[Any], Any], unwritten: Any):
        self.kind, self.make, self.values = kind, make, [unwritten] * size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            try:
                return self.values[index]
            except IndexError:
                pass
        raise _astray("local array", "read", index, len(self.values))

    def __setitem__(self, index: int, value: Any) -> None:
        if index >= 0:
            try:
                self.values[index] = value if type(value) is self.kind else self.make(value)
                return
            except IndexError:
                pass
        raise _astray("local array", "written", index, len(self.values))

    def some(self, index: int, count: int) -> list[Any]:
        """Return `count` elements, without a bounds check."""
        return self.values[index : index + count]

    def put(self, index: int, values: list[Any]) -> None:
        """Write elements of the array's kind, without a bounds check."""
        self.values[index : index + len(values)] = values


def _astray(name: str, what: str, index: int, size: int) -> IndexError:
    thread: Any = greenlet.getcurrent()
    who = f"thread {thread.tid} of block {thread.block.index}"
    return IndexError(f"{name}[{index}] {what}, of {size} elements, by {who}")


def poisoned(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array: all bits set, NaN in every float format."""
    return np.full(size * dtype.itemsize, 0xFF, np.uint8).view(dtype)


_reachable: dict[int, Pointer] = {}


@contextmanager
def reachable(arrays: Mapping[int, Pointer]) -> Iterator[None]:
    """Let kernels find these arrays by addresses from a table, inside the with statement."""
    global _reachable
    before, _reachable = _reachable, dict(arrays)
    try:
        yield
    finally:
        _reachable = before


def located(address: int) -> Pointer:
    """Return the array whose first element is at `address`. Raises IndexError if the launch has none."""
    found = _reachable.get(int(address)) if address else Pointer(np.empty(0), "null pointer")
    if found is None:
        raise IndexError(f"{int(address):#x} is the address of no array of this launch")
    return found
