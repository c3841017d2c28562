"""Write a few 64-bit words to the device by passing them as kernel arguments.

Nothing on the host is read later, even if the launch is captured. Tables of addresses get to the device this way
(`device_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i64, kernel, pointer, types
from ..tile.groups import store_words
from .device import Device
from .step import Step, prepare

CLEARED = 256  # words that a block clears
WORDS = 256  # most words that a launch may write: 2 kilobytes of arguments; every GPU accepts 4


@builds
def build_writer(count: int) -> Kernel:
    """Build write_words(to, first, words): one thread writes `count` words to `to`, from index `first` on."""

    @kernel(pointer(i64), i64, types.UniTuple(i64, count), threads=1)
    def write_words(to, first, words):
        store_words(to, first, words)

    return write_words


@builds
def build_clear() -> Kernel:
    """Build clear_words(to, count): each thread writes a zero."""

    @kernel(pointer(i64), i64, threads=CLEARED)
    def clear_words(to, count):
        i = i64(cuda.blockIdx.x * CLEARED + cuda.threadIdx.x)
        if i < count:
            to[i] = i64(0)

    return clear_words


@cache
def _writer(count: int, device: Device) -> Callable[..., None]:
    names = tuple(f"word {i}" for i in range(count))
    return prepare(Step(build_writer(count), (1,), ("to", "first", names)), ["to", "first", *names], device)


def write_words(to: Any, first: int, words: Sequence[int], device: Device, handle: int) -> None:
    """Write words on a stream of the device, which must be current. to: an address (in the simulator an array)."""
    _writer(len(words), device)([to, first, *words], handle)
