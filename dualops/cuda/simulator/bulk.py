"""Asynchronous copies out of shared memory, in groups of the thread that starts them.

They are late: a copy reads its source until its thread waits for that, and what changed since it began is NaN; what it
writes is there after the wait for its group, or when the blocks have ended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .shared import Late
from .threads import current


class Store:
    """One copy; `land` writes what it has read."""

    def __init__(self, source: Late, land: Callable[[np.ndarray], None]):
        self.source, self.land = source, land
        self.data: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """The end of reading: what was read."""
        if self.data is None:
            self.data = self.source.read()
        return self.data

    def finish(self) -> None:
        """The end of writing."""
        self.land(self.read())


class Stores:
    """A thread's copies, in groups, the last open."""

    def __init__(self) -> None:
        self.groups: list[list[Store]] = [[]]

    def commit(self) -> None:
        self.groups.append([])

    def wait_read(self, pending: int) -> None:
        """Until all groups but the latest `pending` have been read."""
        for group in self.groups[: max(len(self.groups) - 1 - pending, 0)]:
            for store in group:
                store.read()

    def wait(self, pending: int) -> None:
        """Until they have been written, too."""
        while len(self.groups) - 1 > pending:
            for store in self.groups.pop(0):
                store.finish()

    def end(self) -> None:
        """When the blocks have ended. Raises RuntimeError for copies that still read their shared memory."""
        left = sum(store.data is None for group in self.groups for store in group)
        if left:
            raise RuntimeError(f"{left} copies out of shared memory still read it when the blocks have ended")
        for group in self.groups:
            for store in group:
                store.finish()


def stores() -> Stores:
    """Those of the thread that is running."""
    return current().units.setdefault("bulk", Stores())
