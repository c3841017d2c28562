"""The simulator's `cuda` for kernels, and the types of their numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

import numpy as np
from greenlet import getcurrent
from numba.core import types
from numba.np import numpy_support

from .memory import Local, Pointer, poisoned
from .threads import Dim3, current

FEW = 256  # numbers that are cached
INTEGER = np.integer


def maker(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts to a NumPy number of this type, and returns numbers of the type unchanged.

    It takes a third of the time of the type itself: it writes and reads an element of an array.
    """
    cell = np.zeros(1, kind)

    def make(value: Any) -> Any:
        if type(value) is kind:
            return value
        cell[0] = value
        return cell[0]

    return make


single, double = maker(np.float32), maker(np.float64)


class _Quick:
    """A Numba type whose calls make the same numbers as Numba's own, in a tenth of the time."""

    name: str
    bitwidth: int

    def __init__(self, name: str):
        super().__init__(name)  # type: ignore[call-arg] # Numba's, which is the next base
        self.kind: Any = getattr(np, name)  # NumPy's type of the same name
        self.make = maker(self.kind)
        self.unwritten: np.generic = poisoned(1, np.dtype(self.kind))[0]


class Signed(_Quick, types.Integer):
    """A signed integer type for simulated kernels. Its numbers are Python integers, as are kernels' arguments.

    They do not wrap: in compiled kernels, sums and products of 32 bits have 64. Raises OverflowError for a Python
    integer that is too large; a NumPy integer is cast.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.end = 1 << self.bitwidth - 1
        self.first = -self.end

    def __call__(self, value: Any) -> int:  # type: ignore[override]
        if type(value) is int:
            if self.first <= value < self.end:
                return value
            raise OverflowError(f"{value} out of bounds for {self.name}")
        if isinstance(value, INTEGER):
            number = index(value)  # four times as fast as int(value), and six times as fast as value.item()
            if self.first <= number < self.end:
                return number
            return (number + self.end) % (2 * self.end) - self.end
        return int(value) if type(value) is bool else index(self.kind(value))


class Unsigned(_Quick, types.Integer):
    """An unsigned integer type. Its numbers are NumPy's, which wrap; a negative signed number wraps, too."""

    def __init__(self, name: str):
        super().__init__(name)
        self.few = [self.kind(value) for value in range(FEW)]

    def __call__(self, value: Any) -> Any:  # type: ignore[override]
        if type(value) is not int:
            return value if type(value) is self.kind else self.make(value)
        if 0 <= value < FEW:
            return self.few[value]
        size = 1 << self.bitwidth
        return self.make(value + size if -size // 2 <= value < 0 else value)


class Float(_Quick, types.Float):
    """A float type for simulated kernels."""

    def __call__(self, value: Any) -> Any:  # type: ignore[override]
        return value if type(value) is self.kind else self.make(value)


@cache
def _dtype(numba_type: Any) -> np.dtype:
    return numpy_support.as_dtype(numba_type) if isinstance(numba_type, types.Type) else np.dtype(numba_type)


def _calls(frame: Any) -> list[int]:
    """Return the places of the caller and of its callers, up to the kernel, as ids of code and positions in it."""
    calls = []
    while frame is not None:
        calls += (id(frame.f_code), frame.f_lasti)  # an id, since hashing code hashes all its constants
        frame = frame.f_back
    return calls


class _Shared:
    def array(self, shape: int, dtype: Any, alignment: int = 1) -> Pointer:
        """Return the block's array for the calling place in the kernel, through any verbs. size 0: dynamic memory.

        Without `alignment`, the array is aligned only to its element, as in a compiled kernel.
        """
        if shape == 0 and alignment < 16:
            raise RuntimeError("dynamic shared memory may follow other arrays: say alignment=16 or more")
        key = ("dynamic", _dtype(dtype), alignment) if shape == 0 else (*_calls(sys._getframe(1)), alignment)
        return current().block.shared_array(key, shape, _dtype(dtype))


class _Local:
    def array(self, shape: int, dtype: Any) -> Local:
        return Local(shape, dtype.kind, dtype.make, dtype.unwritten)


class _Cuda:
    """The `cuda` of a simulated kernel: the part of numba.cuda that dualops uses."""

    shared, local = _Shared(), _Local()

    def __init__(self) -> None:
        self.blockDim = self.gridDim = Dim3(1)

    @property
    def threadIdx(self) -> Dim3:
        try:
            return getcurrent().threadIdx  # type: ignore[attr-defined] # as `current` does, in half the time
        except AttributeError:
            return current().threadIdx

    @property
    def blockIdx(self) -> Dim3:
        return current().block.index

    def syncthreads(self) -> None:
        thread = current()
        thread.block.barrier.wait(thread.scheduler)

    def syncthreads_or(self, predicate: Any) -> int:
        """Wait for the block. Return 1 if the predicate is true in any thread."""
        thread = current()
        event = thread.block.barrier.event
        event.voted |= bool(predicate)
        thread.block.barrier.wait(thread.scheduler)
        return int(event.voted)

    def grid(self, ndim: int) -> int:
        if ndim != 1:
            raise NotImplementedError("the simulator knows cuda.grid(1)")
        thread = current()
        return thread.block.index.x * self.blockDim.x + thread.threadIdx.x


cuda = _Cuda()
