"""Threads as greenlets, their blocks, and the scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

from .meetings import WARP, WARPGROUP, Barrier, Deadlock, Event, Exchange, MBarrier, RegisterPool
from .memory import Pointer
from .shared import SharedMemory

Waiting = TypeVar("Waiting")


class Dim3(NamedTuple):
    x: int
    y: int = 1
    z: int = 1


class Thread(greenlet):
    """One CUDA thread."""

    def __init__(self, run: Callable[[], None], scheduler: Scheduler, block: Block, index: Dim3, tid: int):
        super().__init__(run, parent=scheduler.host)
        self.scheduler, self.block, self.threadIdx, self.tid = scheduler, block, index, tid
        self.warp, self.lane = divmod(tid, WARP)
        self.bit = 1 << self.lane  # the lane's bit in a mask of lanes
        self.meetings = block.meetings.setdefault(self.warp, {})
        self.gr_context = copy_context()  # includes NumPy's errstate
        self.waiting: Event | None = None  # the event that it waits for
        self.in_cluster = False  # whether it has waited until every block of the cluster runs
        self.arrival: Event | None = None  # the cluster barrier at which it has arrived, and will wait
        # its cp.async copies that have not landed, in groups; the last group is open
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.units: dict[str, Any] = {}  # state of the asynchronous units that work for it


def current() -> Thread:
    """Return the running thread."""
    thread = getcurrent()
    if type(thread) is not Thread:
        raise RuntimeError("this can be called only by a thread of a simulated kernel")
    return thread


class Block:
    """One thread block: its index, its shared memory, its barriers, and its shuffles in progress."""

    def __init__(self, index: Dim3, rank: int, threads: int, shared_bytes: int):
        self.index, self.rank, self.threads = index, rank, threads
        self.shared: dict[Any, Pointer] = {}
        self.shared_bytes = shared_bytes
        self.running = threads  # threads that have not ended
        self.barrier = Barrier("syncthreads", threads)
        self.meetings: dict[int, dict[int, Exchange]] = {}  # warp -> mask of lanes -> their exchange
        self.named: dict[int, Barrier] = {}
        self.registers = RegisterPool(threads)
        self.mbarriers: dict[tuple[Any, int], MBarrier] = {}
        self.cluster: list[Block] = [self]
        self.units: dict[Any, Any] = {}  # state of the asynchronous units that work for warpgroups

    @cached_property
    def memory(self) -> SharedMemory:
        return SharedMemory()

    def named_barrier(self, number: int, threads: int) -> Barrier:
        barrier = self.named.setdefault(number, Barrier(f"bar.sync {number}", threads))
        if barrier.parties != threads:
            raise RuntimeError(f"bar.sync {number}: for {threads} threads here, for {barrier.parties} elsewhere")
        return barrier

    def mbarrier(self, key: Any, index: int, copies: bool = False) -> MBarrier:
        """Return the mbarrier at which threads arrive; copies: at which the copy that is being started arrives.

        Raises RuntimeError for one that they can't see yet, and for one of a block that has ended, whose memory may
        belong to another block.
        """
        if not self.running:
            raise RuntimeError(f"mbarrier {index}: block {self.rank} of the cluster has ended")
        barrier = self.mbarriers.get((key, index))
        if barrier is None:
            raise RuntimeError(f"mbarrier {index}: used before it is initialised")
        if copies:
            if not barrier.fenced:
                raise RuntimeError(f"mbarrier {index}: named to a copy before fence.mbarrier_init")
            current().scheduler.in_flight.named.append(barrier)
        return barrier

    def shared_array(self, key: Any, size: int, dtype: np.dtype) -> Pointer:
        """Return the array of this key (the last part is its alignment), which the first call allocates."""
        if key not in self.shared:
            if size == 0:
                data = self._dynamic(key[-1])
                data = data[: data.size // dtype.itemsize * dtype.itemsize]
            else:
                data = self.memory.take(size * dtype.itemsize, max(key[-1], dtype.itemsize))
            self.shared[key] = Pointer(data.view(dtype), "shared memory", key)
        return self.shared[key]

    def _dynamic(self, alignment: int) -> np.ndarray:
        """Return the dynamic shared memory, with the alignment of its first use."""
        if "dynamic" not in self.units:
            self.units["dynamic"] = self.memory.take(self.shared_bytes, max(alignment, 128))
        data = self.units["dynamic"]
        if data.ctypes.data % alignment:
            raise RuntimeError(f"dynamic shared memory: alignment={alignment} after it was asked for with less")
        return data


class Copy(NamedTuple):
    """A copy that has not landed."""

    land: Callable[[Scheduler], None]
    barriers: list[MBarrier]  # at which it arrives; empty for cp.async


class InFlight:
    """All copies that have not landed, in the order of their start."""

    def __init__(self) -> None:
        self.copies: deque[Copy] = deque()
        self.named: list[MBarrier] = []  # mbarriers of the copy that is being started

    def append(self, land: Callable[[Scheduler], None]) -> None:
        """Add the copy that is being started."""
        self.copies.append(Copy(land, self.named))
        self.named = []

    def put_awaited_first(self) -> None:
        """Move the first copy whose mbarrier a thread waits at to the front, if there is one."""
        for number, copy in enumerate(self.copies):
            if any(barrier.event.waiters for barrier in copy.barriers):
                del self.copies[number]
                self.copies.appendleft(copy)
                return


class Scheduler:
    """Runs the threads of a cluster of blocks, each until it waits.

    "forward", "reversed": threads that have waited run first, and copies land in the order of their start, or in the
    opposite order. "shuffled": both orders are random (the same for the same seed); so are the threads that are late
    among those that others wait for. "scattered": in addition, random lanes of a warp are delayed after a wait at an
    mbarrier, until no other thread can run. "lagging": like "forward", but the warpgroup of this number runs only if no
    other thread can and all copies have landed. "straggling": like "lagging" for one warp, so that other warps can
    synchronize without it. "awaited": like "forward", but copies that a thread waits for land before the others. So a
    missing wait shows, whatever else is in flight.

    A copy lands when no thread can run. Threads that are late run then, too, usually after the copies.
    """

    def __init__(self, order: str, seed: int):
        self.host = getcurrent()
        self.reverse = order == "reversed"
        self.lots = random.Random(seed) if order in ("shuffled", "scattered") else None
        self.scatters = order == "scattered"
        behind = {"lagging": WARPGROUP, "straggling": WARP}.get(order, 0)
        self.laggards = range(seed * behind, (seed + 1) * behind)  # numbers of the delayed threads in the block
        self.in_turn = order in ("forward", "reversed", "awaited")
        self.on_demand = order == "awaited"
        self.ready: deque[Thread] = deque()
        self.late: deque[Thread] = deque()
        self.strays: list[Thread] = []
        self.in_flight = InFlight()
        self.cluster_barrier = Barrier("barrier.cluster", 0)

    def run(self, threads: list[Thread]) -> None:
        self.ready.extend(reversed(threads) if self.reverse else threads)
        alive, copies = len(threads), self.in_flight.copies
        while alive:
            if self.ready:
                thread = self._take(self.ready)
                if thread.tid in self.laggards:
                    self.strays.insert(0, thread)
                else:
                    alive -= self._go_on(thread)
            elif self.late and not (copies and self.by_lot(0.8)):
                self.ready.append(self._take(self.late))
            elif copies:
                if self.on_demand:
                    self.in_flight.put_awaited_first()
                copy = self._take(copies, last=self.reverse)  # copies overtake one another
                copy.land(self)
            elif self.strays:
                alive -= self._go_on(self.strays.pop())  # the first scattered thread is delayed longest
            else:
                self.deadlock([thread for thread in threads if not thread.dead])
        under_way = len(copies) + sum(len(group) for thread in threads for group in thread.copies)
        if under_way:
            raise RuntimeError(f"{under_way} copies are still in flight when the blocks have ended")
        for thread in threads:
            for unit in thread.units.values():
                unit.end()

    def _go_on(self, thread: Thread) -> int:
        """Let a thread run until one waits or ends. Return the number of threads that have ended."""
        self.running = thread
        thread.switch()
        if not self.running.dead:  # maybe not the thread that was started
            return 0
        self.running.block.running -= 1
        return 1

    def _take(self, queue: deque[Waiting], last: bool = False) -> Waiting:
        """Take the first element of a queue, the last, or a random one."""
        if self.lots:
            queue.rotate(self.lots.randrange(len(queue)))
        return queue.pop() if last else queue.popleft()

    def wait(self, event: Event, thread: Thread | None = None) -> None:
        """Called by a thread: let others run until `event` is fired."""
        if not event.fired:
            thread = thread or current()
            thread.waiting = event
            event.waiters.append(thread)
            ready = self.ready
            if ready and self.in_turn and ready[0].waiting is not None:  # begun: a direct switch is faster
                self.running = ready.popleft()
                self.running.switch()
            else:
                self.host.switch()
            thread.waiting = None

    def fire(self, event: Event) -> None:
        """Fire an event. Threads that waited run first: a warp continues as far as it can, ahead of the others."""
        event.fired = True
        self.ready.extendleft(event.waiters if self.reverse else reversed(event.waiters))

    def pause(self) -> None:
        """Called by a thread: let all other threads that can run go first."""
        self.ready.append(current())
        self.host.switch()

    def by_lot(self, share: float = 0.5) -> bool:
        return self.lots is not None and self.lots.random() < share

    def pass_by(self) -> None:
        """Called by a thread that loads, or takes work, also for other threads: at random, it is late from now on."""
        if self.by_lot():
            self.late.append(current())
            self.host.switch()

    def come_back(self) -> None:
        """Called by a thread that has waited at an mbarrier: with "scattered", it is delayed at random."""
        if self.scatters and self.by_lot(0.1):
            self.strays.append(current())
            self.host.switch()

    def deadlock(self, threads: list[Thread]) -> NoReturn:
        waits: dict[str, list[int]] = {}
        for thread in threads:
            name = thread.waiting.name if thread.waiting else "nothing"
            waits.setdefault(f"block {tuple(thread.block.index)} at {name}", []).append(thread.tid)
        places = "; ".join(f"{place}: threads {_ranges(tids)}" for place, tids in waits.items())
        raise Deadlock(f"{len(threads)} threads wait forever: {places}")


def _ranges(tids: Sequence[int]) -> str:
    tids = sorted(tids)
    return f"{tids[0]}..{tids[-1]}" if len(tids) > 4 else ", ".join(map(str, tids))


def exchange(name: str, value: Any, mask: int) -> list[Any]:
    """Exchange a value with the lanes of `mask` in this thread's warp. Return 32 values; None for absent lanes."""
    thread = current()
    if not mask & thread.bit:
        raise RuntimeError(f"{name}: lane {thread.lane} calls with a member mask {mask:#010x} that leaves it out")
    meetings = thread.meetings
    meeting = meetings.get(mask)
    if meeting is None:
        for other in meetings:
            if other & mask:
                raise RuntimeError(
                    f"{name}: lane {thread.lane} brings mask {mask:#010x}, others wait with {other:#010x}"
                )
        meeting = meetings[mask] = Exchange(name, mask)
    if meeting.name != name:
        raise RuntimeError(f"lane {thread.lane} is at {name}, other lanes of its warp wait at {meeting.name}")
    meeting.values[thread.lane] = value
    meeting.missing ^= thread.bit
    if meeting.missing:
        thread.scheduler.wait(meeting.event, thread)
    else:
        del meetings[mask]
        thread.scheduler.fire(meeting.event)
    return meeting.values
