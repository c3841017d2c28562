"""A block's shared memory in two views: that of threads, and that of asynchronous units (copies, tensor cores).

A unit sees a thread's write only after `fence.proxy.async`; until then it sees the earlier data, for example NaN. Both
see what a unit writes. But if a thread wrote there without a fence, the result is NaN. So in the simulator, a kernel
that forgets the fence always computes with stale numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CAPACITY = 1 << 18  # bytes: 14 bits of a matrix descriptor, in units of 16 bytes, can address these
PATTERN = 1024  # the widest swizzle repeats after this number of bytes


def swizzled(address: Any, span: int) -> Any:
    """Return the address at which units put a byte: bits 4 to 6, as far as `span` has them, are XORed with bits 7 to 9.

    span: 128, 64 or 32 bytes; 16 means no swizzle. Works for integers and arrays of them. This is the hardware's
    formula. `tile.swizzle` has the formula again, as kernels assume it.
    """
    return address ^ (address >> 3 & span - 16)


class SharedMemory:
    """The shared memory of one block. Arrays are laid out one after the other, in the order of allocation.

    Raises IndexError for addresses after the last array.
    """

    def __init__(self) -> None:
        self.used = 0
        self._threads, self._units = _aligned(), _aligned()
        self._first = self._threads.ctypes.data

    def take(self, nbytes: int, alignment: int) -> np.ndarray:
        """Allocate bytes filled with 0xFF, at a multiple of `alignment` that is not a multiple of twice `alignment`."""
        at = -(-(self.used - alignment) // (2 * alignment)) * 2 * alignment + alignment
        if at + nbytes > CAPACITY:
            raise RuntimeError(f"{at + nbytes} bytes of shared memory, of {CAPACITY}")
        for seen in (self._threads, self._units):
            seen[self.used : at + nbytes] = 0xFF
        self.used = at + nbytes
        return self._threads[at : self.used]

    def address(self, array: Any, index: int) -> int:
        """Return the address of an element of one of the block's arrays, which is a Pointer."""
        return array.address - self._first + int(index) * array.itemsize

    def fence(self) -> None:
        """Make everything that threads have written visible to units."""
        self._units[: self.used] = self._threads[: self.used]

    def has_unfenced(self, places: np.ndarray) -> bool:
        """Return whether threads wrote at these addresses, and units don't see it yet."""
        self._check(places)
        return not np.array_equal(self._units[places], self._threads[places])

    def read_by_unit(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes that a unit sees at these addresses."""
        self._check(places)
        return self._units[places]

    def read_by_thread(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes that threads see at these addresses."""
        self._check(places)
        return self._threads[places]

    def copied(self, start: int, data: np.ndarray) -> None:
        """Write consecutive bytes as a unit does."""
        for seen in (self._units, self._threads):
            seen[start : start + data.size] = data

    def write_by_unit(self, places: np.ndarray, data: Any) -> None:
        """Write bytes at these addresses as a unit does."""
        if self.has_unfenced(places):
            data = 0xFF  # a race: the threads' unfenced writes may land after the unit's
        self._units[places] = data
        self._threads[places] = data

    def _check(self, places: np.ndarray) -> None:
        if places.size and not 0 <= places.min() <= places.max() < self.used:
            addresses = f"{places.min():#x} to {places.max():#x}"
            raise IndexError(f"a unit accesses shared memory from {addresses}, which ends at {self.used:#x}")


def _aligned() -> np.ndarray:
    memory = np.empty(CAPACITY + PATTERN, np.uint8)
    start = -memory.ctypes.data % PATTERN
    return memory[start : start + CAPACITY]


class Late:
    """Bytes of shared memory that a unit reads at some time between its start and its end.

    If a byte changes in the meantime, also by a thread without a fence, the unit may read the old or the new value. The
    simulator returns NaN.
    """

    def __init__(self, memory: SharedMemory, places: np.ndarray):
        self.memory, self.places = memory, places
        self.first, self.written = memory.read_by_unit(places), memory.read_by_thread(places)

    def read(self, part: slice = slice(None)) -> np.ndarray:
        """Return the bytes, or a part of them, at the end of the unit's read."""
        places = self.places[part]
        last = self.memory.read_by_unit(places)
        same = (self.first[part] == last) & (self.written[part] == self.memory.read_by_thread(places))
        return np.where(same, last, np.uint8(0xFF))
