"""What a kernel calls `cuda`, and the types of its numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any

import numpy as np
from numba.core import types
from numba.np import numpy_support

from .meetings import WARP
from .memory import Local, Pointer, poisoned
from .threads import Dim3, current


class _Quick:
    """A type of Numba's whose calls make NumPy's numbers as Numba's own do, in a tenth of their time."""

    name: str

    def __call__(self, value: Any) -> Any:
        return self.kind(value)

    @cached_property
    def kind(self) -> Callable[[Any], Any]:
        return getattr(np, self.name)


class Integer(_Quick, types.Integer):
    """An integer type for kernels that are simulated."""


class Float(_Quick, types.Float):
    """A float type for kernels that are simulated."""


@cache
def _dtype(numba_type: Any) -> np.dtype:
    return numpy_support.as_dtype(numba_type) if isinstance(numba_type, types.Type) else np.dtype(numba_type)


@cache
def _unwritten(numba_type: Any) -> tuple[type[np.generic], np.generic]:
    """The kind of NumPy's numbers that is like a Numba type, and the one that nobody wrote."""
    dtype = _dtype(numba_type)
    return dtype.type, poisoned(1, dtype)[0]


def _calls(frame: Any) -> Iterator[tuple[Any, int]]:
    """(code, where in it) of who called, and of who called that: what a verb is inlined into."""
    while frame is not None:
        yield frame.f_code, frame.f_lasti
        frame = frame.f_back


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
        return Local(shape, *_unwritten(dtype))


class _Cuda:
    """What a kernel calls `cuda`: the part of numba.cuda that dualops uses."""

    shared, local = _Shared(), _Local()
    warpsize = WARP

    def __init__(self) -> None:
        self.blockDim = self.gridDim = Dim3(1)

    @property
    def threadIdx(self) -> Dim3:
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
