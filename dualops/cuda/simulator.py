"""Numba's CUDA dialect on a CPU: the threads of a block, or of a cluster of blocks, as greenlets.

Switched on as Numba's own simulator is, by NUMBA_ENABLE_CUDASIM=1 before Python starts; the kernels' source is the
same. A thread runs until it must wait (block barrier, shuffle, cluster barrier). If nobody can run, that is a deadlock,
and it is said at once with what everybody waits for. The order in which threads run is a choice: `order("reversed")`.

Memory is hostile. Local and shared arrays start as NaN (all bits set), every access outside an array is an IndexError
with the array's name, and misaligned vector access is an error, where a GPU would go on.

This module is the bottom of `dualops.cuda`: it imports nothing of ours, so that the twins of instructions (`ptx`) can
ask it who is running and wait for other threads.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, cached_property
from math import prod
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import greenlet
import numpy as np
from numba.core import types
from numba.np import numpy_support

WARP = 32


class Deadlock(RuntimeError):
    """No thread of a block (or cluster) can go on."""


class Dim3(NamedTuple):
    x: int
    y: int = 1
    z: int = 1


class Event:
    """Something that threads wait for."""

    def __init__(self, name: str):
        self.name = name
        self.fired = False
        self.voted = False  # whether some thread came with a true predicate
        self.waiters: list[Thread] = []


class Barrier:
    """A barrier for a fixed number of threads, usable again and again."""

    def __init__(self, name: str, parties: int):
        self.name, self.parties, self.arrived = name, parties, 0
        self.event = Event(name)

    def arrive(self, scheduler: Scheduler) -> Event:
        """Count the running thread; returns the event that fires when all have come."""
        event = self.event
        self.arrived += 1
        if self.arrived == self.parties:
            self.event, self.arrived = Event(self.name), 0
            scheduler.fire(event)
        return event

    def wait(self, scheduler: Scheduler) -> None:
        scheduler.wait(self.arrive(scheduler))


class MBarrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes are in."""

    def __init__(self, name: str, count: int):
        self.name, self.count, self.missing, self.nbytes, self.phase = name, count, count, 0, 0
        self.fenced = False  # visible to copies
        self.event = Event(f"{name}, phase 0")

    def arrive(self, scheduler: Scheduler, nbytes: int = 0) -> bool:
        """One arrival, which also announces `nbytes`; returns whether somebody was waiting for it."""
        self.nbytes += nbytes
        self.missing -= 1
        if self.missing < 0:
            raise RuntimeError(f"{self.name}: more than {self.count} arrivals in phase {self.phase}")
        return self._end(scheduler)

    def complete(self, scheduler: Scheduler, nbytes: int) -> bool:
        """So many bytes have landed; they may come before they are announced."""
        self.nbytes -= nbytes
        return self._end(scheduler)

    def _end(self, scheduler: Scheduler) -> bool:
        if self.missing == 0 and self.nbytes == 0:
            event, self.phase, self.missing = self.event, self.phase + 1, self.count
            self.event = Event(f"{self.name}, phase {self.phase}")
            scheduler.fire(event)
            return bool(event.waiters)
        return False


class Pointer:
    """A flat typed array as a kernel sees it: `p[i]` is one element, and nothing outside can be reached.

    `name` is said when an access goes astray; `key` finds the same shared array in another block of the cluster.
    """

    __slots__ = ("address", "data", "itemsize", "key", "name", "size")

    def __init__(self, data: np.ndarray, name: str, key: Any = None):
        self.data, self.name, self.size, self.key = data, name, data.size, key
        self.address, self.itemsize = data.ctypes.data, data.itemsize

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            self.astray("read", index)
        return self.data[index]

    def __setitem__(self, index: int, value: Any) -> None:
        if not 0 <= index < self.size:
            self.astray("written", index)
        self.data[index] = value

    def vector(self, index: int, count: int) -> np.ndarray:
        """`count` adjacent elements, whose address must be a multiple of their size, as a view."""
        index = int(index)  # a NumPy int would make the address wrap
        if index < 0 or index + count > self.size:
            self.astray(f"accessed as {count} elements", index)
        width = count * self.itemsize
        if (self.address + index * self.itemsize) % width:
            raise IndexError(f"{self.name}[{index}] is not aligned to {width} bytes")
        return self.data[index : index + count]

    def astray(self, what: str, index: int) -> NoReturn:
        raise _astray(self.name, what, index, self.size)


class Local:
    """A thread's own array, used as a Pointer is; a list of NumPy's numbers, since that is read and written sooner."""

    __slots__ = ("kind", "values")

    def __init__(self, size: int, kind: Callable[[Any], Any], unwritten: Any):
        self.kind, self.values = kind, [unwritten] * size

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            try:
                return self.values[index]
            except IndexError:
                pass
        raise _astray("local array", "read", index, len(self.values))

    def __setitem__(self, index: int, value: Any) -> None:
        if index >= 0:
            try:
                self.values[index] = value if type(value) is self.kind else self.kind(value)
                return
            except IndexError:
                pass
        raise _astray("local array", "written", index, len(self.values))


def _astray(name: str, what: str, index: int, size: int) -> IndexError:
    thread = current()
    who = f"thread {thread.tid} of block {thread.block.index}"
    return IndexError(f"{name}[{index}] {what}, of {size} elements, by {who}")


class Thread(greenlet.greenlet):
    """One CUDA thread."""

    def __init__(self, run: Callable[[], None], scheduler: Scheduler, block: Block, index: Dim3, tid: int):
        super().__init__(run, parent=scheduler.host)
        self.scheduler, self.block, self.threadIdx, self.tid = scheduler, block, index, tid
        self.warp, self.lane = divmod(tid, WARP)
        self.gr_context = copy_context()  # NumPy's errstate with it
        self.waiting: Event | None = None  # what it waits for now
        self.in_cluster = False  # it knows that every block of the cluster runs
        self.arrival: Event | None = None  # the cluster barrier that it has come to, and will wait for


_reachable: dict[int, Pointer] = {}


@contextmanager
def reachable(arrays: Mapping[int, Pointer]) -> Iterator[None]:
    """Let kernels that run inside the with statement find arrays by their addresses, as they read them from a table."""
    global _reachable
    before, _reachable = _reachable, dict(arrays)
    try:
        yield
    finally:
        _reachable = before


def located(address: int) -> Pointer:
    """The array whose first element lies at `address`. Raises IndexError where the launch has none."""
    found = _reachable.get(int(address)) if address else Pointer(np.empty(0), "null pointer")
    if found is None:
        raise IndexError(f"{int(address):#x} is the address of no array of this launch")
    return found


def current() -> Thread:
    """The thread that is running."""
    thread = greenlet.getcurrent()
    if not isinstance(thread, Thread):
        raise RuntimeError("this can be called only by a thread of a simulated kernel")
    return thread


class Block:
    """One thread block: its index, its shared memory, its barriers, and the shuffles under way."""

    def __init__(self, index: Dim3, rank: int, threads: int, shared_bytes: int):
        self.index, self.rank, self.threads = index, rank, threads
        self.shared: dict[Any, Pointer] = {}
        self.dynamic = placed(shared_bytes, np.dtype(np.uint8), 128)
        self.barrier = Barrier("syncthreads", threads)
        self.exchanges: dict[tuple[int, int], Exchange] = {}
        self.named: dict[int, Barrier] = {}
        self.mbarriers: dict[tuple[Any, int], MBarrier] = {}
        self.cluster: list[Block] = [self]

    def named_barrier(self, number: int, threads: int) -> Barrier:
        barrier = self.named.setdefault(number, Barrier(f"bar.sync {number}", threads))
        if barrier.parties != threads:
            raise RuntimeError(f"bar.sync {number}: for {threads} threads here, for {barrier.parties} elsewhere")
        return barrier

    def mbarrier(self, key: Any, index: int, copies: bool = False) -> MBarrier:
        """The mbarrier that threads, or copies, arrive at. Raises RuntimeError for one that they cannot see yet."""
        barrier = self.mbarriers.get((key, index))
        if barrier is None:
            raise RuntimeError(f"mbarrier {index}: used before it is initialised")
        if copies and not barrier.fenced:
            raise RuntimeError(f"mbarrier {index}: named to a copy before fence.mbarrier_init")
        return barrier

    def shared_array(self, key: Any, size: int, dtype: np.dtype) -> Pointer:
        """The array of this key (whose last part is its alignment), made when it is first asked for."""
        if key not in self.shared:
            alignment = key[-1]
            if size == 0:
                data = self.dynamic[: self.dynamic.size // dtype.itemsize * dtype.itemsize].view(dtype)
            else:
                data = placed(size, dtype, alignment)
            self.shared[key] = Pointer(data, "shared memory", key)
        return self.shared[key]


class Exchange:
    """A meeting of the lanes of one warp: each brings a value, all leave with everybody's."""

    def __init__(self, name: str, mask: int):
        self.name, self.mask, self.values = name, mask, [None] * WARP
        self.missing = mask
        self.event = Event(f"{name} with lanes {mask:#010x}")


class Scheduler:
    """Runs the threads of a cluster of blocks, each until it waits."""

    def __init__(self, reverse: bool):
        self.host = greenlet.getcurrent()
        self.reverse = reverse
        self.ready: deque[Thread] = deque()
        self.in_flight: deque[Callable[[Scheduler], None]] = deque()  # copies, which land when nobody can run
        self.cluster_barrier = Barrier("barrier.cluster", 0)

    def run(self, threads: list[Thread]) -> None:
        self.ready.extend(reversed(threads) if self.reverse else threads)
        alive = len(threads)
        while alive:
            if self.ready:
                thread = self.ready.popleft()
                thread.switch()
                alive -= thread.dead
            elif self.in_flight:
                # copies overtake one another
                land = self.in_flight.pop() if self.reverse else self.in_flight.popleft()
                land(self)
            else:
                self.deadlock([thread for thread in threads if not thread.dead])
        if self.in_flight:
            raise RuntimeError(f"{len(self.in_flight)} copies are still under way when the blocks have ended")

    def wait(self, event: Event) -> None:
        """Called by a thread: let others run until `event` is fired."""
        if not event.fired:
            thread = current()
            thread.waiting = event
            event.waiters.append(thread)
            self.host.switch()
            thread.waiting = None

    def fire(self, event: Event) -> None:
        """Who waited goes first: a warp runs on as far as it can, and leaves the others behind."""
        event.fired = True
        self.ready.extendleft(event.waiters if self.reverse else reversed(event.waiters))

    def pause(self) -> None:
        """Called by a thread: let everybody else who can run go first."""
        self.ready.append(current())
        self.host.switch()

    def deadlock(self, threads: list[Thread]) -> NoReturn:
        waits: dict[str, list[int]] = {}
        for thread in threads:
            name = thread.waiting.name if thread.waiting else "nothing"
            waits.setdefault(f"block {tuple(thread.block.index)} at {name}", []).append(thread.tid)
        told = "; ".join(f"{place}: threads {_ranges(tids)}" for place, tids in waits.items())
        raise Deadlock(f"{len(threads)} threads wait for ever: {told}")


def _ranges(tids: Sequence[int]) -> str:
    tids = sorted(tids)
    return f"{tids[0]}..{tids[-1]}" if len(tids) > 4 else ", ".join(map(str, tids))


def exchange(name: str, value: Any, mask: int) -> list[Any]:
    """Meet the lanes of `mask` in this thread's warp; returns 32 values, those of absent lanes None."""
    thread = current()
    if not mask >> thread.lane & 1:
        raise RuntimeError(f"{name}: lane {thread.lane} calls with a member mask {mask:#010x} that leaves it out")
    meetings = thread.block.exchanges
    key = (thread.warp, mask)
    meeting = meetings.get(key)
    if meeting is None:
        for other_warp, other_mask in meetings:
            if other_warp == thread.warp and other_mask & mask:
                told = f"lane {thread.lane} brings mask {mask:#010x}, others wait with {other_mask:#010x}"
                raise RuntimeError(f"{name}: {told}")
        meeting = meetings[key] = Exchange(name, mask)
    if meeting.name != name:
        raise RuntimeError(f"lane {thread.lane} is at {name}, other lanes of its warp wait at {meeting.name}")
    meeting.values[thread.lane] = value
    meeting.missing &= ~(1 << thread.lane)
    if meeting.missing:
        thread.scheduler.wait(meeting.event)
    else:
        del meetings[key]
        thread.scheduler.fire(meeting.event)
    return meeting.values


def poisoned(size: int, dtype: np.dtype) -> np.ndarray:
    """An array that nobody wrote: all bits set, NaN in every float format."""
    return np.full(size * dtype.itemsize, 0xFF, np.uint8).view(dtype)


def placed(size: int, dtype: np.dtype, alignment: int) -> np.ndarray:
    """A poisoned array at a multiple of `alignment` bytes (or of its element), and of no larger power of two."""
    alignment = max(alignment, dtype.itemsize)
    memory = poisoned(size * dtype.itemsize + 3 * alignment, np.dtype(np.uint8))
    start = -memory.ctypes.data % (2 * alignment) + alignment
    return memory[start : start + size * dtype.itemsize].view(dtype)


class _Quick:
    """A type of Numba's whose calls make NumPy's numbers as Numba's own do, in a tenth of their time."""

    name: str

    def __call__(self, value: Any) -> Any:
        return self.kind(value)

    @cached_property
    def kind(self) -> Callable[[Any], Any]:
        return getattr(np, self.name)


class Integer(_Quick, types.Integer):
    """An integer type for kernels that are simulated."""


class Float(_Quick, types.Float):
    """A float type for kernels that are simulated."""


@cache
def _dtype(numba_type: Any) -> np.dtype:
    return numpy_support.as_dtype(numba_type) if isinstance(numba_type, types.Type) else np.dtype(numba_type)


@cache
def _unwritten(numba_type: Any) -> tuple[type[np.generic], np.generic]:
    """The kind of NumPy's numbers that is like a Numba type, and the one that nobody wrote."""
    dtype = _dtype(numba_type)
    return dtype.type, poisoned(1, dtype)[0]


class _Shared:
    def array(self, shape: int, dtype: Any, alignment: int = 1) -> Pointer:
        """One array a block for each place in the code that asks; size 0 is the dynamic shared memory.

        Without `alignment`, a compiled array is aligned to its element and no more, and so it is here.
        """
        caller = sys._getframe(1)
        if shape == 0 and alignment < 16:
            raise RuntimeError("dynamic shared memory may follow other arrays: say alignment=16 or more")
        key = ("dynamic", _dtype(dtype), alignment) if shape == 0 else (caller.f_code, caller.f_lasti, alignment)
        return current().block.shared_array(key, shape, _dtype(dtype))


class _Local:
    def array(self, shape: int, dtype: Any) -> Local:
        return Local(shape, *_unwritten(dtype))


class _Cuda:
    """What a kernel calls `cuda`: the part of numba.cuda that dualops uses."""

    shared, local = _Shared(), _Local()
    warpsize = WARP

    def __init__(self) -> None:
        self.blockDim = self.gridDim = Dim3(1)

    @property
    def threadIdx(self) -> Dim3:
        return current().threadIdx

    @property
    def blockIdx(self) -> Dim3:
        return current().block.index

    def syncthreads(self) -> None:
        thread = current()
        thread.block.barrier.wait(thread.scheduler)

    def syncthreads_or(self, predicate: Any) -> int:
        """Wait for the block; 1 if any of its threads came with a true predicate."""
        thread = current()
        event = thread.block.barrier.event
        event.voted |= bool(predicate)
        thread.block.barrier.wait(thread.scheduler)
        return int(event.voted)

    def grid(self, ndim: int) -> int:
        if ndim != 1:
            raise NotImplementedError("the simulator knows cuda.grid(1)")
        thread = current()
        return thread.block.index.x * self.blockDim.x + thread.threadIdx.x


cuda = _Cuda()
_reverse = False


@contextmanager
def order(name: str) -> Iterator[None]:
    """Run threads and blocks "forward" or "reversed" inside the with statement."""
    global _reverse
    if name not in ("forward", "reversed"):
        raise ValueError(f"order is {name!r}, expected 'forward' or 'reversed'")
    before, _reverse = _reverse, name == "reversed"
    try:
        yield
    finally:
        _reverse = before


def launch(
    function: FunctionType,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    *,
    cluster: int = 1,
    shared_bytes: int = 0,
) -> None:
    """Run a kernel to its end. Arrays among `args` are `Pointer`s; grid, block: up to three sizes.

    `cluster` consecutive blocks along x run together. Raises what a thread raises, and Deadlock.
    """
    grid3, block3 = Dim3(*grid), Dim3(*block)
    if grid3.x % cluster:
        raise ValueError(f"grid of {grid3.x} blocks along x, expected a multiple of the cluster's {cluster}")
    before = cuda.gridDim, cuda.blockDim
    cuda.gridDim, cuda.blockDim = grid3, block3
    try:
        with np.errstate(all="ignore"):
            firsts = [(x, y, z) for z in range(grid3.z) for y in range(grid3.y) for x in range(0, grid3.x, cluster)]
            for x, y, z in reversed(firsts) if _reverse else firsts:
                indices = [Dim3(x + rank, y, z) for rank in range(cluster)]
                _run_cluster(function, indices, block3, args, shared_bytes)
    finally:
        cuda.gridDim, cuda.blockDim = before


def _run_cluster(
    function: FunctionType, indices: list[Dim3], block_dim: Dim3, args: Sequence[Any], shared_bytes: int
) -> None:
    scheduler = Scheduler(_reverse)
    size = prod(block_dim)
    blocks = [Block(index, rank, size, shared_bytes) for rank, index in enumerate(indices)]
    scheduler.cluster_barrier = Barrier("barrier.cluster", size * len(blocks))
    threads = []
    for block in blocks:
        block.cluster = blocks
        for tid in range(size):
            rest, x = divmod(tid, block_dim.x)
            z, y = divmod(rest, block_dim.y)
            threads.append(Thread(lambda: function(*args), scheduler, block, Dim3(x, y, z), tid))
    scheduler.run(threads)
