"""Asynchronous copies from shared memory, in groups of the thread that starts them.

They are delayed. A copy reads its source until its thread waits for the read, and reads NaN for bytes that changed in
between. Its writes are visible after the wait for its group, or when the blocks have ended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .shared import Late
from .threads import current


class Store:
    """One copy; `land` writes the bytes that it has read."""

    def __init__(self, source: Late, land: Callable[[np.ndarray], None]):
        self.source, self.land = source, land
        self.data: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """End the read, and return the bytes."""
        if self.data is None:
            self.data = self.source.read()
        return self.data

    def finish(self) -> None:
        """End the write."""
        self.land(self.read())


class Stores:
    """A thread's copies, in groups; the last group is open."""

    def __init__(self) -> None:
        self.groups: list[list[Store]] = [[]]

    def commit(self) -> None:
        self.groups.append([])

    def wait_read(self, pending: int) -> None:
        """End the reads of all groups except the latest `pending`."""
        for group in self.groups[: max(len(self.groups) - 1 - pending, 0)]:
            for store in group:
                store.read()

    def wait(self, pending: int) -> None:
        """End the writes of these groups, too."""
        while len(self.groups) - 1 > pending:
            for store in self.groups.pop(0):
                store.finish()

    def end(self) -> None:
        """Finish all copies after the blocks have ended. Raises RuntimeError for copies that still read shared
        memory."""
        left = sum(store.data is None for group in self.groups for store in group)
        if left:
            raise RuntimeError(f"{left} copies out of shared memory still read it when the blocks have ended")
        for group in self.groups:
            for store in group:
                store.finish()


def stores() -> Stores:
    """Return the copies of the running thread."""
    return current().units.setdefault("bulk", Stores())
