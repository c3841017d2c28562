"""A block's shared memory by its addresses, as threads see it and as asynchronous units do: copies, tensor cores.

What a thread writes such a unit sees after `fence.proxy.async`; until then it sees what was there before, NaN say. What
units write both see, but where threads wrote without a fence: that is NaN. So a kernel that forgets the fence computes
with stale numbers here, always.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CAPACITY = 1 << 18  # bytes: what the 14 bits of a matrix descriptor reach, in units of 16
PATTERN = 1024  # bytes after which the widest swizzle repeats


def swizzled(address: Any, span: int) -> Any:
    """Where the units put a byte: bits 4 to 6 of its address, as far as `span` has them, are flipped by bits 7 to 9.

    span: 128, 64 or 32 bytes; 16 leaves everything in its place. For integers and arrays of them. This is what the
    units do. `tile.swizzle` has the same formula again, as the assumption of kernels.
    """
    return address ^ (address >> 3 & span - 16)


class SharedMemory:
    """The bytes of one block; arrays are laid out one behind the other as kernels ask for them.

    Raises IndexError for addresses behind the last array.
    """

    def __init__(self) -> None:
        self.used = 0
        self._threads, self._units = _aligned(), _aligned()
        self._first = self._threads.ctypes.data

    def take(self, nbytes: int, alignment: int) -> np.ndarray:
        """Bytes that nobody wrote, at a multiple of `alignment` and of no larger power of two."""
        at = -(-(self.used - alignment) // (2 * alignment)) * 2 * alignment + alignment
        if at + nbytes > CAPACITY:
            raise RuntimeError(f"{at + nbytes} bytes of shared memory, of {CAPACITY}")
        for seen in (self._threads, self._units):
            seen[self.used : at + nbytes] = 0xFF
        self.used = at + nbytes
        return self._threads[at : self.used]

    def address(self, array: Any, index: int) -> int:
        """The address of an element of one of the block's arrays, a Pointer."""
        return array.address - self._first + int(index) * array.itemsize

    def fence(self) -> None:
        """What threads have written until now is there for units, too."""
        self._units[: self.used] = self._threads[: self.used]

    def has_unfenced(self, places: np.ndarray) -> bool:
        """Whether threads wrote there, and units don't see it yet."""
        self._check(places)
        return not np.array_equal(self._units[places], self._threads[places])

    def read_by_unit(self, places: np.ndarray) -> np.ndarray:
        """The bytes that a unit finds at addresses."""
        self._check(places)
        return self._units[places]

    def read_by_thread(self, places: np.ndarray) -> np.ndarray:
        """The bytes that threads find there."""
        self._check(places)
        return self._threads[places]

    def copied(self, start: int, data: np.ndarray) -> None:
        """Bytes that a unit writes one behind the other."""
        for seen in (self._units, self._threads):
            seen[start : start + data.size] = data

    def write_by_unit(self, places: np.ndarray, data: Any) -> None:
        """What a unit writes there."""
        if self.has_unfenced(places):
            data = 0xFF  # what threads wrote there may come after it
        self._units[places] = data
        self._threads[places] = data

    def _check(self, places: np.ndarray) -> None:
        if places.size and not 0 <= places.min() <= places.max() < self.used:
            addresses = f"{places.min():#x} to {places.max():#x}"
            raise IndexError(f"a unit is sent to shared memory from {addresses}, which ends at {self.used:#x}")


def _aligned() -> np.ndarray:
    memory = np.empty(CAPACITY + PATTERN, np.uint8)
    start = -memory.ctypes.data % PATTERN
    return memory[start : start + CAPACITY]


class Late:
    """Bytes of shared memory that a unit reads some time between its start and its end.

    What changes in the meantime, also what threads write without a fence, is read as it was, as it is or as neither:
    here as NaN.
    """

    def __init__(self, memory: SharedMemory, places: np.ndarray):
        self.memory, self.places = memory, places
        self.first, self.written = memory.read_by_unit(places), memory.read_by_thread(places)

    def read(self, part: slice = slice(None)) -> np.ndarray:
        """The bytes, at the end of the reading; or a part of them."""
        places = self.places[part]
        last = self.memory.read_by_unit(places)
        same = (self.first[part] == last) & (self.written[part] == self.memory.read_by_thread(places))
        return np.where(same, last, np.uint8(0xFF))
