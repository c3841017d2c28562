"""Tensor maps for simulated copies of boxes: records that a kernel finds by their addresses."""

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
    Parts of a box outside of the array are loaded as zeros, and not stored. A kernel may use the record by its
    `address` as long as the record is alive.
    """

    def __init__(self, array: np.ndarray, box: Sequence[int], span: int, *, rounds: bool = False):
        self.rounds, self.array, self.box, self.span = rounds, array, tuple(box), span
        self.nbytes = int(np.prod(self.box)) * array.itemsize
        self._place = np.zeros(2 * NBYTES, np.uint8)  # never read; it gives the record a unique address
        self.address = -(-self._place.ctypes.data // NBYTES) * NBYTES
        _MAPS[self.address] = self

    def places(self, start: int) -> np.ndarray:
        """Return the addresses of a box's bytes; `start` is the first one. Raises IndexError if it is misaligned."""
        alignment = max(128, 8 * self.span if self.span > 16 else 0)
        if start % alignment:
            raise IndexError(f"a box at shared address {start:#x}, expected a multiple of {alignment} bytes")
        return swizzled(start + np.arange(self.nbytes), self.span)

    def load(self, coordinates: Sequence[int]) -> np.ndarray:
        """Return the bytes of a box."""
        box = np.zeros(self.box[::-1], self.array.dtype)
        inside, there = self._slices(coordinates)
        box[there] = as_tf32(self.array[inside]) if self.rounds else self.array[inside]
        return box.reshape(-1).view(np.uint8)

    def forget(self, coordinates: Sequence[int]) -> None:
        """Set a box to NaN until it is written."""
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
            raise IndexError(f"a box stored to {rows}, expected a multiple of 16: zeros are written after them")
        self.array[inside] = data.view(self.array.dtype).reshape(self.box[::-1])[there]

    def _slices(self, coordinates: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a box that is in the array: its slices in the array, and in the box."""
        inside, there = [], []
        for first, count, size in zip(coordinates[::-1], self.box[::-1], self.array.shape, strict=True):
            low, high = max(int(first), 0), min(int(first) + count, size)
            high = max(low, high)
            inside.append(slice(low, high))
            there.append(slice(low - int(first), high - int(first)))
        return tuple(inside), tuple(there)


def as_tf32(numbers: np.ndarray) -> np.ndarray:
    """Round float32 to 11 bits of mantissa, ties away from zero."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(numbers), rounded, numbers)


def tensor_map_at(address: int) -> TensorMap:
    """Return the record at an address. Raises IndexError if there is none."""
    found = _MAPS.get(int(address))
    if found is None:
        raise IndexError(f"{int(address):#x} is the address of no tensor map")
    return found
