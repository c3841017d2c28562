"""Tensor maps that kernels are launched with: encoded once for an address, kept on the device from call to call.

A rung says which it needs, `Choice(..., maps={"a_map": Mapped("a", ...)})`, and names them among its kernels' arguments
as it names arrays: such an argument gets the address of the map. What a map says depends on the array's address and
layout alone, so it does not matter whose memory that was before. A call with arrays at other addresses encodes its maps
anew, which the launch of a kernel of one thread writes; the MOST latest are kept, and those that a captured graph may
read (`kept`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from operator import itemgetter
from struct import unpack
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from .kept import Kept, Memory, Place, Streams
from .tensor_map import NBYTES, ROUNDED as ROUNDED, Boxes, boxes_of
from .words import write_words

MOST = 1024  # calls' maps, 128 bytes each
MOST_RECENT = 64  # calls of a plan whose maps are found without asking whether they are written
WORDS = NBYTES // 8


class Mapped(NamedTuple):
    """The boxes of an array that a kernel loads or stores, as `tensor_map.Boxes` has them."""

    array: str  # its name in the call
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    span: int = 128

    @property
    def boxes(self) -> Boxes:
        return boxes_of(self.dtype, self.shape, self.strides, self.box, self.span)


class Written(NamedTuple):
    """Maps on the device: nobody frees the memory as long as somebody has this."""

    memory: Memory
    addresses: list[int]


class Latest(NamedTuple):
    """What the latest call of a plan with arrays at the same addresses had."""

    streams: Streams
    written: Written

    def serves(self, key: Hashable, streams: Streams) -> bool:
        """Whether a call like it, on its library's own stream, needs no more than it had."""
        alike = self.streams == streams and _KEPT.get(key) is self.written
        return alike and streams.home == streams.handle and not streams.captured


class Maps:
    """The tensor maps of one plan's launches."""

    def __init__(self, wanted: Sequence[Mapped], names: Sequence[str | None]):
        """names: of the call's arrays, in the order of their addresses."""
        self.number = next(_NUMBERS)
        self.boxes = [each.boxes for each in wanted]
        self.places = [names.index(each.array) for each in wanted]
        self.own = itemgetter(*self.places)  # a tuple, since nobody has but one map
        self.recent: dict[tuple[int, ...], Latest] = {}  # by the addresses of the arrays

    def written(self, addresses: Sequence[int], place: Place, streams: Streams) -> Written:
        """The maps of arrays at these addresses, there when the stream comes to what is launched now.

        Whoever launches holds on to it until that is done. The GPU of `place` must be current.
        """
        own = self.own(addresses)
        key = (self.number, own)
        latest = self.recent.get(own)
        if latest is not None and latest.serves(key, streams):
            return latest.written
        with _LOCK:
            found = _KEPT.get(key)
            if found is None or not found.memory.is_written(streams):
                found = self._write(own, place, streams)
            _KEPT.keep(key, found, streams, MOST)
        found.memory.used_on(streams)
        if len(self.recent) >= MOST_RECENT:
            self.recent.clear()
        self.recent[own] = Latest(streams, found)
        return found

    def _write(self, own: Sequence[int], place: Place, streams: Streams) -> Written:
        encoded = b"".join(boxes.encoded(address) for boxes, address in zip(self.boxes, own))
        memory = Memory(place, streams, WORDS * len(own))
        (first,) = memory.places
        write_words(first, 0, unpack(f"{WORDS * len(own)}q", encoded), place.device, streams.handle)
        memory.written()
        return Written(memory, [first + NBYTES * i for i in range(len(own))])

    def simulated(self, arrays: Sequence[Any]) -> list[Any]:
        """Records of the maps, for the simulator; kernels get their `address` as long as somebody has them."""
        views = (
            np.lib.stride_tricks.as_strided(
                arrays[which], boxes.shape, [stride * arrays[which].itemsize for stride in boxes.strides]
            )
            for which, boxes in zip(self.places, self.boxes)
        )
        return [boxes.simulated(view) for boxes, view in zip(self.boxes, views)]


def forget() -> None:
    """Let go of all maps but those that captured graphs may read: the next calls make theirs anew."""
    with _LOCK:
        _KEPT.clear()


_NUMBERS = count()
_KEPT = Kept[Written]()
_LOCK = RLock()
