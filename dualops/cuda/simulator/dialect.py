"""What a kernel calls `cuda`, and the types of its numbers."""

from __future__ import annotations

import sys
from functools import cache
from operator import index
from typing import Any

import numpy as np
from greenlet import getcurrent
from numba.core import types
from numba.np import numpy_support

from .meetings import WARP
from .memory import Local, Pointer, poisoned
from .numbers import maker
from .threads import Dim3, current

FEW = 256  # numbers that are made once
INTEGER = np.integer


class _Quick:
    """A type of Numba's whose calls make numbers as Numba's own do, in a tenth of their time."""

    name: str
    bitwidth: int

    def __init__(self, name: str):
        super().__init__(name)  # type: ignore[call-arg] # Numba's, which is the next base
        self.kind: Any = getattr(np, name)  # NumPy's numbers that are like it
        self.make = maker(self.kind)
        self.unwritten: np.generic = poisoned(1, np.dtype(self.kind))[0]


class Signed(_Quick, types.Integer):
    """A signed integer type for kernels that are simulated. Its numbers are Python's, as kernels' arguments are.

    They do not wrap: compiled, sums and products of 32 bits have 64. Raises OverflowError for one of Python's that is
    too large; one of NumPy's is cast.
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
            number = index(value)  # a quarter of what int(value) takes, and value.item() six times that
            if self.first <= number < self.end:
                return number
            return (number + self.end) % (2 * self.end) - self.end
        return int(value) if type(value) is bool else index(self.kind(value))


class Unsigned(_Quick, types.Integer):
    """An unsigned one, of NumPy's numbers, which wrap, and which a signed one below 0 becomes."""

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
    """A float type for kernels that are simulated."""

    def __call__(self, value: Any) -> Any:  # type: ignore[override]
        return value if type(value) is self.kind else self.make(value)


@cache
def _dtype(numba_type: Any) -> np.dtype:
    return numpy_support.as_dtype(numba_type) if isinstance(numba_type, types.Type) else np.dtype(numba_type)


def _calls(frame: Any) -> list[int]:
    """Code by its id, where in it: of who called, and of who called that, what a verb is inlined into."""
    calls = []
    while frame is not None:
        calls += (id(frame.f_code), frame.f_lasti)  # the hash of code is that of all its constants
        frame = frame.f_back
    return calls


class _Shared:
    def array(self, shape: int, dtype: Any, alignment: int = 1) -> Pointer:
        """One array a block for each place in the kernel that asks, by whatever verbs; size 0 is the dynamic memory.

        Without `alignment`, a compiled array is aligned to its element and no more, and so it is here.
        """
        if shape == 0 and alignment < 16:
            raise RuntimeError("dynamic shared memory may follow other arrays: say alignment=16 or more")
        key = ("dynamic", _dtype(dtype), alignment) if shape == 0 else (*_calls(sys._getframe(1)), alignment)
        return current().block.shared_array(key, shape, _dtype(dtype))


class _Local:
    def array(self, shape: int, dtype: Any) -> Local:
        return Local(shape, dtype.kind, dtype.make, dtype.unwritten)


class _Cuda:
    """What a kernel calls `cuda`: the part of numba.cuda that dualops uses."""

    shared, local = _Shared(), _Local()
    warpsize = WARP

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
        """Wait for the block; 1 if any of its threads came with a true predicate."""
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
