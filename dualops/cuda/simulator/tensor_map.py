"""What a tensor map tells the copies of boxes: here a record, found by its address as a kernel has it."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from .shared import swizzled

NBYTES = 128
_MAPS: WeakValueDictionary[int, TensorMap] = WeakValueDictionary()


class TensorMap:
    """Boxes of an array in global memory, whose last axis is contiguous.

    box: elements along each axis, the last axis first, as are coordinates. span: bytes of the swizzle, 16 for none.
    rounds: whether loads round float32 to tf32.
    What a box has outside of the array is zeros when it is loaded, and is not stored. As long as somebody has the
    record, a kernel may use it by its `address`.
    """

    def __init__(self, array: np.ndarray, box: Sequence[int], span: int, *, rounds: bool = False):
        self.rounds, self.array, self.box, self.span = rounds, array, tuple(box), span
        self.nbytes = int(np.prod(self.box)) * array.itemsize
        self._place = np.zeros(2 * NBYTES, np.uint8)  # nobody reads it: for an address of its own
        self.address = -(-self._place.ctypes.data // NBYTES) * NBYTES
        _MAPS[self.address] = self

    def places(self, start: int) -> np.ndarray:
        """Where the bytes of a box lie whose first is at a shared address. Raises IndexError for a misaligned one."""
        alignment = max(128, 8 * self.span if self.span > 16 else 0)
        if start % alignment:
            raise IndexError(f"a box at shared address {start:#x}, expected a multiple of {alignment} bytes")
        return swizzled(start + np.arange(self.nbytes), self.span)

    def load(self, coordinates: Sequence[int]) -> np.ndarray:
        """The bytes of a box."""
        box = np.zeros(self.box[::-1], self.array.dtype)
        inside, there = self._slices(coordinates)
        box[there] = as_tf32(self.array[inside]) if self.rounds else self.array[inside]
        return box.reshape(-1).view(np.uint8)

    def forget(self, coordinates: Sequence[int]) -> None:
        """Make a box NaN, which will be written some time."""
        inside, _ = self._slices(coordinates)
        part = self.array[inside]
        part[...] = np.full(part.size * part.itemsize, 0xFF, np.uint8).view(part.dtype).reshape(part.shape)

    def store(self, coordinates: Sequence[int], data: np.ndarray) -> None:
        """Write a box of bytes.

        Raises IndexError if rows are not a multiple of 16 bytes long: a GPU then writes zeros after them.
        """
        inside, there = self._slices(coordinates)
        if self.array.shape[-1] * self.array.itemsize % 16:
            rows = f"rows of {self.array.shape[-1] * self.array.itemsize} bytes"
            raise IndexError(f"a box stored to {rows}, expected a multiple of 16: zeros are written behind them")
        self.array[inside] = data.view(self.array.dtype).reshape(self.box[::-1])[there]

    def add(self, coordinates: Sequence[int], data: np.ndarray) -> None:
        """Add a box of bytes, in the array's dtype."""
        inside, there = self._slices(coordinates)
        self.array[inside] += data.view(self.array.dtype).reshape(self.box[::-1])[there]

    def _slices(self, coordinates: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a box that is in the array: where in the array, and where in the box."""
        inside, there = [], []
        for first, count, size in zip(coordinates[::-1], self.box[::-1], self.array.shape, strict=True):
            low, high = max(int(first), 0), min(int(first) + count, size)
            high = max(low, high)
            inside.append(slice(low, high))
            there.append(slice(low - int(first), high - int(first)))
        return tuple(inside), tuple(there)


def as_tf32(numbers: np.ndarray) -> np.ndarray:
    """float32 rounded to 11 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(numbers), rounded, numbers)


def tensor_map_at(address: int) -> TensorMap:
    """The record at an address. Raises IndexError where there is none."""
    found = _MAPS.get(int(address))
    if found is None:
        raise IndexError(f"{int(address):#x} is the address of no tensor map")
    return found
