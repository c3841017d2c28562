"""Tables of tensors on the device: the addresses of a call's tensors, ready to launch again.

A table is written by kernels whose arguments are its words: nothing waits, nothing on the host has to stay, and a
capture takes them along. A new table is new memory: what a kernel may still read is never written again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...spec import ArrayMeta
from ..arrays import Adapter
from ..backend import SIMULATED
from ..device import Device
from ..step import Mark, Step, prepare
from . import dense
from .formula import Dtypes, Lr, Rates


class Group(NamedTuple):
    """Tensors of one combination of dtypes, which are one launch."""

    dtypes: Dtypes
    config: dense.DenseConfig
    places: np.ndarray  # [tensors, 6]: where the arrays of formula.ROLES are among the call's, -1 for a missing one
    N: np.ndarray  # [tensors] elements


class Streams(NamedTuple):
    """Where a call's work goes."""

    home: int  # the library's current stream, which memory is allocated for
    handle: int  # the one that is launched on
    captured: bool  # whether that is being captured


class Tables:
    """Those of a call, one for each of its groups."""

    def __init__(
        self,
        groups: Sequence[Group],
        names: Sequence[str],
        pointers: Sequence[int],
        lr_on_device: bool,
        adapter: Adapter,
        device: Device,
        device_name: str,
        streams: Streams,
    ):
        """names, pointers: of the call's arrays."""
        self.adapter, self.streams = adapter, streams
        self.memory: list[Any] = []
        self.launches: list[Callable[..., None]] = []
        lr = Lr(0.0, "lr", 1) if lr_on_device else Lr("lr", "no lr", 0)
        parts = [words_of(group, pointers) for group in groups]
        for words, _ in parts:
            self.memory.append(adapter.allocator(ArrayMeta((words.size,), "int64", (1,), device_name, 0))())
        if streams.home != streams.handle and not streams.captured:
            Mark(streams.home).hold_up(streams.handle)  # what the memory was before may still be in use there
        write = _writer(device)
        for group, (words, blocks), table in zip(groups, parts, self.memory, strict=True):
            where = table if SIMULATED else adapter.pointer(table)
            for first in range(0, words.size, dense.WORDS):
                part = words[first : first + dense.WORDS].tolist()
                _start(write, [where, first, *part], streams.handle)
            step = Step(
                dense.build_table(group.config, group.dtypes),
                (blocks,),
                ("table", len(group.N), lr, Rates(*Rates._fields)),
            )
            self.launches.append(prepare(step, ["table", "lr", *Rates._fields, *names], device))
        self.mark = None if streams.captured or SIMULATED else Mark(streams.handle)

    def are_written(self, streams: Streams) -> bool:
        """Whether what is launched now, or is captured now and launched later, finds them written."""
        if SIMULATED or (streams.handle == self.streams.handle and not streams.captured):
            return True
        return self.mark is not None and self.mark.is_over()

    def launch(self, lr: Any, rates: Rates, arrays: Sequence[Any], streams: Streams) -> None:
        """lr: a number, or the address of one (simulated, an array)."""
        for launch, table in zip(self.launches, self.memory, strict=True):
            if SIMULATED:
                _start(launch, [table, lr, *rates, *arrays], 0)
                continue
            _start(launch, [self.adapter.pointer(table), lr, *rates], streams.handle)
            if streams.handle != self.streams.home and not streams.captured:  # what a graph may read is never freed
                self.adapter.used_on(table, streams.handle, self.streams.home)


def words_of(group: Group, pointers: Sequence[int]) -> tuple[np.ndarray, int]:
    """The words of a group's table, in whole writers' shares, and the blocks of its launch."""
    addresses = np.array([*pointers, 0], np.int64)[group.places]  # [tensors, 6]
    there = addresses[:, (group.places >= 0).all(axis=0)]
    heads = dense.heads(group.dtypes, there)
    chunks = dense.chunks(group.config, group.dtypes, group.N, heads)
    first = np.cumsum(chunks) - chunks
    rows = np.column_stack([addresses, group.N, heads])
    words = np.concatenate([first, rows.reshape(-1)])
    return np.pad(words, (0, -words.size % dense.WORDS)), int(chunks.sum())


def _start(launch: Callable[..., None], values: list[Any], handle: int) -> None:
    launch(values) if SIMULATED else launch(values, handle)


@cache
def _writer(device: Device) -> Callable[..., None]:
    """What writes WORDS words of a table."""
    words = tuple(f"word {i}" for i in range(dense.WORDS))
    return prepare(Step(dense.build_writer(), (1,), ("table", "first", words)), ["table", "first", *words], device)
