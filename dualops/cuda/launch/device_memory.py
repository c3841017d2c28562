"""Device memory that outlives launches and captured graphs: what kernels are pointed to, kept from call to call.

Tables of addresses, and whatever else a kernel finds by an address that is one of its arguments. Three rules make it
safe, without ever waiting for the GPU:

1  `Memory` is written by what is launched on a stream, and never again: what a kernel may still read is new memory.
2  A launch on another stream calls `is_written` first, and allocates new memory if the write is not known to be done.
   `used_on` records a read on another stream, so that the library does not reuse the memory before the read is done.
3  What was made or used while a stream was captured is kept forever, since a graph may read it at any time. Of
   everything else `Kept` holds the latest, and frees the oldest in the order of the streams that used them.
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
    """The stream that a call's work goes to."""

    home: int  # the library's current stream, which memory is allocated for
    handle: int  # the one that is launched on
    captured: bool  # whether that is being captured


def streams_of(op: str, adapter: Adapter, arrays: Sequence[Any], handle: int | None) -> Streams:
    """Where work on arrays goes: to the stream that the caller gave, or their library's. Their GPU must be current."""
    if SIMULATED:
        return Streams(0, handle or 0, False)
    home = adapter.stream(arrays if handle is None else arrays[:1], op)
    if handle is None or handle == home:  # a library tells sooner than the driver whether its own stream is captured
        return Streams(home, home, adapter.is_capturing(home))
    return Streams(home, handle, is_capturing(handle))


@cache
def _allocator(adapter: Adapter, device: str) -> Any:
    return adapter.allocator("int64", device)


class Memory:
    """Arrays of 64-bit words on a device, that kernels read from call to call. See the module's docstring."""

    def __init__(self, place: Place, streams: Streams, *words: int):
        """words: of each array, whose values are undefined until somebody writes them on the stream and says so by
        `written`. The GPU of `place` must be current.
        """
        self.place, self.streams = place, streams
        make = _allocator(place.adapter, place.name)
        self.arrays = [make((count,), (1,)) for count in words]
        self.mark: Mark | None = None
        if streams.home != streams.handle and not streams.captured:
            # what the memory was before may still be in use there
            Mark(streams.home, place.device.index).hold_up(streams.handle)

    @property
    def places(self) -> list[Any]:
        """What a launch is given of each array: its address (simulated, the array)."""
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
    """Memory of earlier calls, found again by a key; and, without a key, memory that captured graphs may read."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[Value] = []

    def keep(self, key: Hashable, value: Value, streams: Streams, most: int) -> None:
        """A call on these streams uses it: keep it, and without those that graphs may read no more than `most`."""
        if streams.captured:  # what is captured is written when the graph is launched: no other call may find it
            if not any(value is each for each in self.captured):
                self.captured.append(value)
        elif self.get(key) is not value:
            while len(self) >= most:
                self.pop(next(iter(self)))
            self[key] = value
