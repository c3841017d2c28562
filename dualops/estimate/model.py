"""From a kernel's work to its time: a roofline with tiles and waves.

A kernel is pieces of work, each of a number of steps: an attention block's queries and the tiles of keys that they see,
a tile of a product and the slices of its sum. A step keeps each unit of an SM busy for some clocks. Units work at the
same time. So a step takes as long as its busiest unit, plus some clocks in which no unit is busy: threads wait for one
another, or for a product that has just begun. A GPU has a number of slots for pieces. The slot that is busy longest
decides.

    step = max(clocks of each unit) + waits, or what a copy takes to arrive, where that is longer
    piece = (steps + one more, in which it fills and drains) * step / clock + what it waits for before + BEYOND
    kernel = max(makespan of its pieces over the slots, bytes / bandwidth) + LAUNCH * launches
    clock = the working clock, or less where tensor cores are busier than the chip has power for
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .architectures import Architecture

# seconds; measured for matmul on an H200: START and TILE of matmul/sm90/config.py
LAUNCH = 2.6e-6  # of a launch
BEYOND = 1.0e-6  # before and after a piece's own steps
# of the data sheet's bandwidth what a plain copy reaches: 4.2 TB/s of an H200's 4.8 (`dualops info` measures it)
REACHED = 0.875
# clocks from asking for a tile that lies in L2 to the first of it, which is assumed, and bytes that come to an SM in
# each thereafter: 51 at least, by matmul's tile of 64 x 32 (192 bytes in 1.9 ns), and the next power of two is assumed
LATENCY, COPIED = 1000, 64

UNITS = ("tensor cores", "exponentials", "arithmetic", "shared memory")


class Units(NamedTuple):
    """Clocks of each unit of an SM, in the order of UNITS."""

    tensor: float
    exponentials: float
    arithmetic: float
    shared: float


@dataclass(frozen=True)
class Work:
    """What a kernel does. All blocks that an SM has at once count as slots; `step` and `waits` are those of one."""

    step: Units
    waits: float  # clocks of a step in which no unit is busy
    pieces: Mapping[int, int]  # steps of a piece -> how many pieces have that many
    memory_bytes: int  # read and written, each once
    blocks: int = 1  # that an SM has at once
    copied_bytes: int = 0  # of a step's tiles
    ahead: int = 1  # steps before they are needed that tiles are asked for
    fills: int = 1  # additional steps of a piece: nothing overlaps its first and last
    begins_bytes: int = 0  # that a piece waits for before its first step: not loaded during the one before
    beyond: float = BEYOND
    launches: int = 1
    sharing: int = 1  # blocks of a cluster that share a piece


@dataclass(frozen=True)
class Estimate:
    """A time, and where it goes. busy: of each unit and of memory the seconds that it is at work; lost: seconds that
    are lost in waits, in what comes before and after pieces, in waves, that is for slots that have nothing left, and in
    launches.
    """

    seconds: float
    busy: Mapping[str, float]
    lost: Mapping[str, float]

    @property
    def bound(self) -> str:
        """What holds it up: the unit that is busiest, or a loss that is larger."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def shares(self) -> dict[str, float]:
        """Of each unit and loss, the part of the time; units work side by side, so that it may come to more than 1."""
        return {name: value / self.seconds for name, value in (*self.busy.items(), *self.lost.items())}

    @property
    def reason(self) -> str:
        """The three largest shares, of a tenth or more; the first is what bounds it."""
        first, *others = sorted(self.shares.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} {share:.0%}" for name, share in (first, *(each for each in others if each[1] >= 0.1)))

    def __add__(self, other: Estimate) -> Estimate:
        """Of one kernel after the other."""
        return Estimate(self.seconds + other.seconds, _added(self.busy, other.busy), _added(self.lost, other.lost))


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def estimate_of(work: Work, gpu: Architecture) -> Estimate:
    """How long it takes on a GPU, launches counted."""
    busiest = work.blocks * max(work.step)
    clocks = busiest + work.waits
    arrival = LATENCY + work.blocks * work.copied_bytes / COPIED
    clocks = max(clocks, arrival / work.ahead) if work.ahead else clocks + arrival
    hertz = min(gpu.working_clock, gpu.full_clock * clocks / (work.blocks * work.step.tensor))
    step, slots = clocks / hertz, max(1, gpu.sms // work.sharing) * work.blocks
    begins = (LATENCY + work.blocks * work.begins_bytes / COPIED) / hertz if work.begins_bytes else 0
    ends = work.fills * step + begins + work.beyond
    times = {steps * step + ends: count for steps, count in work.pieces.items() if steps}
    steps, pieces = (sum(numbers) for numbers in zip(*((n * c, c) for n, c in work.pieces.items() if n), strict=True))
    each = steps / slots / hertz  # seconds of a clock that every step has
    longest, even = makespan(times, slots), sum(time * count for time, count in times.items()) / slots
    memory = memory_seconds(work.memory_bytes, gpu)
    busy = {name: work.blocks * clocks * each for name, clocks in zip(UNITS, work.step, strict=True)}
    lost = {
        "waits": (clocks - busiest) * each,
        "ends of tiles": pieces / slots * ends,
        "waves": longest - even,
        "launches": work.launches * LAUNCH,
    }
    return Estimate(max(longest, memory) + work.launches * LAUNCH, {**busy, "memory": memory}, lost)


def memory_seconds(count: float, gpu: Architecture) -> float:
    """Return the seconds in which memory moves `count` bytes."""
    return count / (REACHED * gpu.memory_bandwidth)


def copying(count: float, gpu: Architecture) -> Estimate:
    """Estimate a kernel that only reads and writes `count` bytes."""
    seconds = memory_seconds(count, gpu)
    return Estimate(seconds + LAUNCH, {"memory": seconds}, {"launches": LAUNCH})


def makespan(times: Mapping[float, int], slots: int) -> float:
    """Return when the last piece ends, the longest first: a free slot takes the next. times: seconds -> pieces."""
    ends = np.zeros(slots)
    for time in sorted(times, reverse=True):
        rounds, rest = divmod(times[time], slots)
        ends += rounds * time
        if rest:
            free = np.argpartition(ends, rest - 1)[:rest]
            ends[free] += time
    return float(ends.max())
