"""Device memory that outlives launches and captured graphs, kept from call to call.

It holds tables of addresses, and other data to which a kernel's argument points. Three rules make it safe without ever
waiting for the GPU:

1  Launches on a stream write a `Memory` once. New contents get new memory, since a kernel may still read the old one.
2  A launch on another stream calls `is_written` first, and allocates new memory if the write is not known to be done.
   `used_on` records a read on another stream, so that the library does not reuse the memory before the read is done.
3  Memory that was made or used while a stream was captured is kept forever, since a graph may read it at any time.
   `Kept` holds the latest of the other memory, and frees the oldest in the order of the streams that used it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ..compiler.backend import SIMULATED
from .arrays import Adapter
from .device import Device
from .driver import Mark, is_capturing

Value = TypeVar("Value")


class Place(NamedTuple):
    """The device of arrays."""

    adapter: Adapter
    device: Device
    name: str  # of the device


class Streams(NamedTuple):
    """The stream of a call's work."""

    home: int  # the library's current stream, on which memory is allocated
    handle: int  # the stream of the launches
    captured: bool  # whether it is being captured


def streams_of(op: str, adapter: Adapter, arrays: Sequence[Any], handle: int | None) -> Streams:
    """Return the stream for work on arrays: the caller's, or their library's. Their GPU must be current."""
    if SIMULATED:
        return Streams(0, handle or 0, False)
    home = adapter.stream(arrays if handle is None else arrays[:1], op)
    if handle is None or handle == home:  # a library knows faster than the driver whether its own stream is captured
        return Streams(home, home, adapter.is_capturing(home))
    return Streams(home, handle, is_capturing(handle))


@cache
def _allocator(adapter: Adapter, device: str) -> Any:
    return adapter.allocator("int64", device)


class Memory:
    """Arrays of 64-bit words on a device, that kernels read from call to call. See the module's docstring."""

    def __init__(self, place: Place, streams: Streams, *words: int):
        """words: number of each array's words. They are undefined until the caller writes them on the stream and calls
        `written`. The GPU of `place` must be current.
        """
        self.place, self.streams = place, streams
        make = _allocator(place.adapter, place.name)
        self.arrays = [make((count,), (1,)) for count in words]
        self.mark: Mark | None = None
        if streams.home != streams.handle and not streams.captured:
            # earlier contents of the memory may still be in use there
            Mark(streams.home, place.device.index).hold_up(streams.handle)

    @property
    def places(self) -> list[Any]:
        """Each array as a launch's argument: its address (in the simulator the array)."""
        return self.arrays if SIMULATED else list(map(self.place.adapter.pointer, self.arrays))

    def written(self) -> None:
        """Record that every launch that writes it was issued."""
        if not (self.streams.captured or SIMULATED):
            self.mark = Mark(self.streams.handle, self.place.device.index)

    def is_written(self, streams: Streams) -> bool:
        """Whether a kernel that is launched or captured now will find the memory written."""
        if SIMULATED or (streams.handle == self.streams.handle and not streams.captured):
            return True
        return self.mark is not None and self.mark.is_over()

    def used_on(self, streams: Streams) -> None:
        """Record a read on these streams: the memory may not be reused before it is done."""
        if streams.handle != self.streams.home and not streams.captured:  # what a graph may read is never freed
            for array in self.arrays:
                self.place.adapter.used_on(array, streams.handle, self.streams.home)


class Kept(dict[Hashable, Value]):
    """Memory of earlier calls, by a key; and, without a key, memory that captured graphs may read."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[Value] = []

    def keep(self, key: Hashable, value: Value, streams: Streams, most: int) -> None:
        """Keep memory that a call on these streams uses, at most `most` in addition to memory that graphs may read."""
        if streams.captured:  # a captured write runs when the graph is launched: no other call may use the memory
            if not any(value is each for each in self.captured):
                self.captured.append(value)
        elif self.get(key) is not value:
            while len(self) >= most:
                self.pop(next(iter(self)))
            self[key] = value
