"""Tables of tensors on the device: the addresses of a call's tensors, and its prepared launches.

Kernels write a table's words, which are their arguments: nothing waits, no host memory must stay, and a captured graph
includes these launches. A new table is new memory (`device_memory`). If a table of the same layout exists, it is copied
on the device and only different words are written: new gradients are one column of nine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..compiler.backend import SIMULATED
from ..launch.device_memory import Memory, Place, Streams
from ..launch.device_words import WORDS, write_words
from ..launch.driver import copy
from ..launch.step import Step, prepare
from . import dense
from .formula import Dtypes, Rates, lr_argument


class Group(NamedTuple):
    """Tensors of one combination of dtypes: one launch."""

    dtypes: Dtypes
    config: dense.DenseConfig
    places: np.ndarray  # [tensors, 6]: indices among the call's arrays, in the order of ROLES; -1 for an absent one
    N: np.ndarray  # [tensors]: elements


class Tables:
    """The tables of a call, one for each of its groups."""

    def __init__(
        self,
        groups: Sequence[Group],
        names: Sequence[str],
        addresses: np.ndarray,
        lr_on_device: bool,
        place: Place,
        streams: Streams,
        like: Tables | None,
    ):
        """names, addresses: of the call's arrays. like: written tables of the same groups, if any.

        The GPU of `place` must be current.
        """
        parts = [words_of(group, addresses) for group in groups]
        self.words = [words for words, _ in parts]
        self.memory = Memory(place, streams, *(words.size for words in self.words))
        self.copied = like if streams.captured else None  # kept: a graph copies it at each replay
        self._write(like)
        lr = lr_argument(lr_on_device)
        known = ["table", "lr", *Rates._fields, *(names if SIMULATED else ())]
        self.launches: list[Callable[..., None]] = []
        for group, (_, blocks) in zip(groups, parts, strict=True):
            kernel = dense.build_table(group.config, group.dtypes)
            step = Step(kernel, (blocks,), ("table", len(group.N), lr, Rates(*Rates._fields)))
            self.launches.append(prepare(step, known, place.device))
        self.memory.written()

    def _write(self, like: Tables | None) -> None:
        """Fill the memory: write all words, or copy `like` and write the words that differ."""
        streams, device = self.memory.streams, self.memory.place.device
        for i, (table, words) in enumerate(zip(self.memory.places, self.words, strict=True)):
            changed = np.arange(words.size)
            if like is not None and words.size > WORDS:  # else one launch writes all words
                copy(table, like.memory.places[i], words.nbytes, streams.handle)
                changed = np.flatnonzero(words != like.words[i])
            for first in pieces(changed, words.size):
                write_words(table, first, words[first : first + WORDS].tolist(), device, streams.handle)
        if like is not None:
            like.memory.used_on(streams)

    def launch(self, lr: Any, rates: Rates, arrays: Sequence[Any], streams: Streams) -> None:
        """Launch the step of each group. lr: a number, or the address of one (in the simulator an array)."""
        for launch, table in zip(self.launches, self.memory.places, strict=True):
            launch([table, lr, *rates, *(arrays if SIMULATED else ())], streams.handle)
        self.memory.used_on(streams)


def words_of(group: Group, addresses: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the words of a group's table, padded to at least WORDS, and the blocks of its launch."""
    missing = group.places < 0
    own = np.where(missing, 0, addresses[group.places])  # [tensors, 6]
    heads = dense.heads(group.dtypes, own[:, ~missing.any(axis=0)])
    chunks = dense.chunks(group.config, group.dtypes, group.N, heads)
    words = np.column_stack([np.cumsum(chunks) - chunks, own, group.N, heads]).T.reshape(-1)
    return np.pad(words, (0, max(WORDS - words.size, 0))), int(chunks.sum())


def pieces(changed: np.ndarray, size: int) -> Iterator[int]:
    """Yield where runs of WORDS words begin, within `size` words, that together cover the sorted indices `changed`."""
    done = 0
    while done < changed.size:
        first = min(int(changed[done]), size - WORDS)
        yield first
        done = int(np.searchsorted(changed, first + WORDS))
