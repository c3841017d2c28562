"""From a kernel's work to its time: a roofline with tiles and waves.

A kernel is a number of pieces of work, and a piece is a number of steps. In attention, a piece is a block's queries,
with a step per tile of keys that they see. In matmul, a piece is a tile of the product, with a step per slice of its
sum. A step keeps each unit of an SM busy for some clocks, all at the same time. It takes as long as the busiest unit,
plus the clocks in which no unit is busy: threads wait for one another, or for a product that has just begun. The kernel
takes as long as the SM that is busy longest.

    step = max(clocks of each unit) + waits, or the clocks until its copies arrive, if they are more
    piece = steps * step / clock + BEYOND
    kernel = max(makespan of its pieces, bytes / bandwidth) + LAUNCH * launches
    clock = the working clock, or less if tensor cores would exceed the chip's power limit
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .architectures import Architecture

# seconds; measured for matmul on an H200: START and TILE of matmul/sm90/config.py
LAUNCH = 2.6e-6  # per launch
BEYOND = 1.0e-6  # before and after a piece's own steps
REACHED = 0.875  # share of the data sheet's bandwidth in a plain copy: 4.2 TB/s of an H200's 4.8 (`dualops info`)
# assumed: clocks from a request for a tile in L2 to its first bytes; bytes per clock that an SM then receives
LATENCY, COPIED = 1000, 64
# clocks per step that threads wait for a barrier and for the first results of a product; and further clocks, for each
# warpgroup in turns. They and FORWARD_EXPOSED of attention_work.py were fitted to ten figures (README.md)
STEP, HANDOVER = 230, 385
Units = dict[str, float]  # clocks of each unit of an SM


class Product(NamedTuple):
    """A product [rows, depth] @ [depth, columns] of one block. left: whether shared memory holds the left factor."""

    rows: int
    columns: int
    depth: int
    left: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    def shared_bytes(self, rows: int = 64, columns: int = 0) -> float:
        """Return the bytes of 16-bit factors that are read from shared memory, 16 deep at a time.

        rows, columns: of the tile of a warpgroup or a warp; columns=0 for all.
        """
        columns = columns or self.columns
        parts = self.rows / rows * self.columns / columns
        return parts * self.depth / 16 * 32 * (rows * self.left + columns)


def units(
    gpu: Architecture,
    products: Iterable[Product],
    scores: float = 0,
    instructions: float = 0,
    moved_bytes: float = 0,
    warp: tuple[int, int] | None = None,
) -> Units:
    """Return the clocks per step. scores: number of exponentials. moved_bytes: further bytes that are written to or
    read from shared memory. warp: rows and columns of a warp's part, 0 columns for all; None for Hopper's warpgroups.
    """
    products = list(products)
    shared = sum(each.shared_bytes(*(warp or ())) for each in products) + moved_bytes
    return {
        "tensor cores": sum(each.flops for each in products) / (gpu.warp_tensor if warp else gpu.tensor),
        "exponentials": scores / gpu.exponentials,
        "arithmetic": instructions / gpu.lanes,
        "shared memory": shared / gpu.shared_bandwidth,
    }


def waits(step: Units, exposed: float, groups: int, turns: bool = False, times: float = 1) -> float:
    """Return the clocks per step in which no unit is busy.

    exposed: the share of a step's exponentials and arithmetic that no product hides. groups: the number of groups of
    threads with steps of their own; one group alone hides nothing. turns: each group computes its exponentials during
    the other's products. times: the number of products that threads wait for.
    """
    if turns and groups > 1:
        return STEP + HANDOVER * groups
    return times * STEP + (exposed if groups > 1 else 1) * (step["exponentials"] + step["arithmetic"])


@dataclass(frozen=True)
class Work:
    """What a kernel does. Each block on an SM is a slot; `step` and `waits` are for one block."""

    step: Units
    waits: float
    pieces: Mapping[int, int]  # steps of a piece -> how many pieces have that many
    memory_bytes: int  # read and written, each once
    blocks: int = 1  # that an SM runs at the same time
    copied_bytes: int = 0  # the tiles of a step
    ahead: int = 1  # how many steps before their use tiles are requested
    beyond: float = BEYOND
    launches: int = 1


@dataclass(frozen=True)
class Estimate:
    """An estimated time, and where it goes.

    busy: the busy seconds of each unit and of memory. lost: the seconds in waits; before and after pieces; in waves,
    when some slots have no piece left; and in launches.
    """

    seconds: float
    busy: Mapping[str, float]
    lost: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The share of the time, for each unit and loss. Units work in parallel, so the sum may exceed 1."""
        return {name: value / self.seconds for name, value in (*self.busy.items(), *self.lost.items())}

    @property
    def reason(self) -> str:
        """The three largest shares, if they are a tenth or more; the first one is the bound."""
        first, *others = sorted(self.shares.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} {share:.0%}" for name, share in (first, *(each for each in others if each[1] >= 0.1)))

    def __add__(self, other: Estimate) -> Estimate:
        """Estimate one kernel after the other."""
        busy, lost = (
            {name: one.get(name, 0.0) + two.get(name, 0.0) for name in {**one, **two}}
            for one, two in ((self.busy, other.busy), (self.lost, other.lost))
        )
        return Estimate(self.seconds + other.seconds, busy, lost)


def estimate_of(work: Work, gpu: Architecture) -> Estimate:
    """Estimate the time on a GPU, including launches."""
    busiest = work.blocks * max(work.step.values())
    arrival = LATENCY + work.blocks * work.copied_bytes / COPIED
    clocks = busiest + work.waits
    clocks = max(clocks, arrival / work.ahead) if work.ahead else clocks + arrival
    hertz = min(gpu.working_clock, gpu.full_clock * clocks / (work.blocks * work.step["tensor cores"]))
    slots = gpu.device.sms * work.blocks
    times = {steps * clocks / hertz + work.beyond: count for steps, count in work.pieces.items() if steps}
    pieces = sum(times.values())
    each = sum(steps * count for steps, count in work.pieces.items()) / slots / hertz  # seconds of a step's clock
    longest, even = makespan(times, slots), sum(time * count for time, count in times.items()) / slots
    busy = {name: work.blocks * clocks * each for name, clocks in work.step.items()}
    lost = {"waits": (clocks - busiest) * each, "ends of tiles": pieces / slots * work.beyond, "waves": longest - even}
    moving = copying(work.memory_bytes, gpu, work.launches)
    seconds = max(moving.seconds, longest + moving.lost["launches"])
    return Estimate(seconds, {**busy, **moving.busy}, {**lost, **moving.lost})


def copying(count: float, gpu: Architecture, launches: int = 1) -> Estimate:
    """Estimate kernels that only read and write `count` bytes."""
    seconds = count / (REACHED * gpu.device.memory_bandwidth)
    return Estimate(seconds + launches * LAUNCH, {"memory": seconds}, {"launches": launches * LAUNCH})


def makespan(times: Mapping[float, int], slots: int) -> float:
    """Return the time at which the last piece ends, if free slots take the pieces in order, the longest first.

    times: seconds -> number of pieces.
    """
    ends = np.zeros(slots)
    for time in sorted(times, reverse=True):
        rounds, rest = divmod(times[time], slots)
        ends += rounds * time
        if rest:
            free = np.argpartition(ends, rest - 1)[:rest]
            ends[free] += time
    return float(ends.max())
