"""Objects that threads wait for: barriers, mbarriers, and exchanges among the lanes of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .threads import Scheduler, Thread

WARP = 32
WARPGROUP = 128
SM_REGISTERS = 65536


class Deadlock(RuntimeError):
    """No thread of a block (or cluster) can continue."""


class Event:
    """An event that threads wait for."""

    def __init__(self, name: str):
        self.name = name
        self.fired = False
        self.voted = False  # whether the predicate was true in any thread
        self.waiters: list[Thread] = []


class Barrier:
    """A barrier for a fixed number of threads, which can be used repeatedly."""

    def __init__(self, name: str, parties: int):
        self.name, self.parties, self.arrived = name, parties, 0
        self.event = Event(name)

    def arrive(self, scheduler: Scheduler) -> Event:
        """Count the running thread. Return the event that fires when all threads have arrived."""
        event = self.event
        self.arrived += 1
        if self.arrived == self.parties:
            self.event, self.arrived = Event(self.name), 0
            scheduler.fire(event)
        return event

    def wait(self, scheduler: Scheduler) -> None:
        scheduler.wait(self.arrive(scheduler))

    def pass_by(self, scheduler: Scheduler) -> None:
        """Count the running thread, which continues. Raises RuntimeError if all threads arrive and none waits."""
        if self.arrived == self.parties - 1 and not self.event.waiters:
            raise RuntimeError(f"{self.name}: all {self.parties} threads have arrived, and none of them waited")
        self.arrive(scheduler)


class MBarrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes have come."""

    def __init__(self, name: str, count: int):
        self.name, self.count, self.missing, self.nbytes, self.phase = name, count, count, 0, 0
        self.fenced = False  # visible to copies
        self.event = Event(f"{name}, phase 0")

    def arrive(self, scheduler: Scheduler, nbytes: int = 0) -> bool:
        """Count one arrival, which also expects `nbytes`. Return whether a thread was waiting for it."""
        self.nbytes += nbytes
        self.missing -= 1
        if self.missing < 0:
            raise RuntimeError(f"{self.name}: more than {self.count} arrivals in phase {self.phase}")
        return self._end(scheduler)

    def complete(self, scheduler: Scheduler, nbytes: int) -> bool:
        """Count `nbytes` landed bytes; they may land before they are expected."""
        self.nbytes -= nbytes
        return self._end(scheduler)

    def _end(self, scheduler: Scheduler) -> bool:
        if self.missing == 0 and self.nbytes == 0:
            event, self.phase, self.missing = self.event, self.phase + 1, self.count
            self.event = Event(f"{self.name}, phase {self.phase}")
            scheduler.fire(event)
            return bool(event.waiters)
        return False


class RegisterPool:
    """The registers that the warps of a block can move between each other, if it is the only block on its SM."""

    def __init__(self, threads: int):
        self.first = min(SM_REGISTERS // threads // 8 * 8, 256)  # per thread, when the block begins
        self.counts: dict[int, int] = {}  # warp -> registers per thread, for warps that changed it
        self.free = 0
        self.more = Event("setmaxnreg.inc, for registers that nobody gives")
        self.warpgroups: dict[tuple[int, str], Barrier] = {}

    def give(self, scheduler: Scheduler, count: int) -> None:
        """Free `count` registers; if `count` is negative, take them."""
        self.free += count
        if count > 0:
            event, self.more = self.more, Event(self.more.name)
            scheduler.fire(event)

    def warpgroup(self, number: int, name: str) -> Barrier:
        """Return the barrier at which the threads of a warpgroup synchronize for one instruction."""
        return self.warpgroups.setdefault((number, name), Barrier(name, 4 * WARP))


class Exchange:
    """An exchange among the lanes of one warp: each lane passes a value and gets those of all lanes."""

    def __init__(self, name: str, mask: int):
        self.name, self.mask, self.values = name, mask, [None] * WARP
        self.missing = mask
        self.event = Event(f"{name} with lanes {mask:#010x}")
