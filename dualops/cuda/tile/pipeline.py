"""A pipeline of stages in shared memory: one producer thread fills them by copies, and warps read them.

Fillings are numbered by `i`. Filling i is in stage i % stages, in phase i // stages of the stage's two mbarriers.
`full` counts the producer and the bytes of the copies, and `empty` counts the warps that have read. In a cluster whose
blocks send copies to each other, a stage is refilled only after the readers of every block have released it. So warps
arrive at the barriers of all blocks.

    producer                                    readers
    stage = pipe.acquire(barriers, i)           stage = pipe.wait(barriers, i)
    tile.load(smem, stage, ..., barriers)       ...
                                                pipe.release(barriers, i)

`second_barrier`: a part of a stage may arrive later, and warps may write to it. One release frees both. It may have
more stages than the pipeline: if the pipeline's stage is free, its own is free, too. The kernels that own keys use one
alone, with a single stage, for K and V.

    producer                                    readers
    stage = pipe.acquire(barriers, i)           stage = pipe.wait(barriers, i)
    tile.load(smem, stage, ..., barriers.full)  ...
    part.expect(full, i)                        part.wait(full, i)
    other_tile.load(smem, stage, ..., full)     ...
                                                part.leave()
                                                pipe.release(barriers, i)

`places`: what warps write, for other warps or for copies.

A synchronized warp arrives with one of its lanes. compute-sanitizer's racecheck does not understand that, so `make
sanitize` gives it a copy of the library in which ARRIVING_LANES is 32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compiler.backend import Members, Noun, cuda, i32, kept_noun, members, u32, u64, verb
from ..ptx.arithmetic import opaque_i32
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_cta,
)
from ..ptx.warp import bar_warp_sync, barrier_cluster_arrive, barrier_cluster_wait
from .rows import FULL_WARP


class Barriers(NamedTuple):
    """A pipeline's mbarriers, in shared memory."""

    full: Any
    empty: Any


Pipeline = Noun  # of `pipeline`
ARRIVING_LANES = 1  # of each warp; 1 or 32


def arrivals(warps: int) -> int:
    """Return how often `warps` warps arrive at an mbarrier."""
    return warps * ARRIVING_LANES


@verb
def arrives():
    """Return whether my lane arrives for its warp."""
    return u32(cuda.threadIdx.x) % u32(32) < u32(ARRIVING_LANES)


@kept_noun
def places(count: int, writers: int, readers: int) -> Members:
    """The verbs of `count` places, which `writers` arrivals fill and `readers` arrivals free. Filling i has place i %
    count, and phase i // count of its two mbarriers.
    """
    COUNT = u32(count)  # unsigned: shorter code for % and //

    @verb
    def barriers():
        """Return the barriers in shared arrays; once in a kernel, by all threads."""
        return Barriers(cuda.shared.array(count, u64), cuda.shared.array(count, u64))

    @verb
    def init(barriers):
        """Initialize the barriers; by one thread, before a pipeline's `start`."""
        for place in range(count):
            mbarrier_init(barriers.full, place, writers)
            mbarrier_init(barriers.empty, place, readers)

    @verb
    def claim(barriers, i):
        """Wait until the place is free. Return the place."""
        place = i32(u32(i) % COUNT)
        mbarrier_wait_cta(barriers.empty, place, u32(i) // COUNT & 1 ^ 1)
        return place

    @verb
    def hand(barriers, i):
        """Signal that the lanes of my warp have written their share."""
        bar_warp_sync(FULL_WARP)
        if arrives():
            mbarrier_arrive(barriers.full, i32(u32(i) % COUNT))

    @verb
    def take(barriers, i):
        """Wait until all warps have written theirs. Return the place."""
        place = i32(u32(i) % COUNT)
        mbarrier_wait_cta(barriers.full, place, u32(i) // COUNT & 1)
        return place

    @verb
    def free(barriers, i):
        """Signal that the place has been read; `readers` threads call it."""
        mbarrier_arrive(barriers.empty, i32(u32(i) % COUNT))

    return locals()


@kept_noun
def pipeline(stages: int, nbytes: int, warps: int, cluster: int = 1) -> Members:
    """The verbs of a pipeline with `stages` stages of `nbytes` each, which `warps` warps of each block read."""
    STAGES = u32(stages)  # unsigned: no sign handling below
    own = places(stages, 1, warps * cluster if cluster > 1 else arrivals(warps))

    @verb
    def start():
        """Make the barriers visible to all threads of the cluster."""
        fence_mbarrier_init()
        if cluster > 1:
            barrier_cluster_arrive()
            barrier_cluster_wait()
        else:
            cuda.syncthreads()

    @verb
    def leave():
        """After the last filling, wait until no block of the cluster needs this one's memory."""
        if cluster > 1:
            barrier_cluster_arrive()
            barrier_cluster_wait()

    @verb
    def stage(i):
        """Return the stage of filling i, without a wait."""
        return i32(u32(i) % STAGES)

    @verb
    def acquire(barriers, i):
        """Wait until the stage is free, and expect its bytes. Return the stage."""
        stage = i32(u32(i) % STAGES)
        free = u32(i) // STAGES & 1 ^ 1  # the previous phase has ended; for a new barrier that is true
        mbarrier_wait_cta(barriers.empty, stage, free)
        mbarrier_arrive_expect_tx(barriers.full, stage, nbytes)
        return stage

    @verb
    def next(i):
        """Return i + 1. The compiler does not unroll a loop that counts like this."""
        return u32(opaque_i32(i + 1))

    @verb
    def wait(barriers, i):
        """Wait until the stage's bytes have arrived. Return the stage."""
        stage = i32(u32(i) % STAGES)
        mbarrier_wait_cta(barriers.full, stage, u32(i) // STAGES & 1)
        return stage

    @verb
    def release(barriers, i):
        """Release the stage, after all lanes of my warp have read it, for example after the wait for a product."""
        stage, lane = i32(u32(i) % STAGES), i32(u32(cuda.threadIdx.x) % u32(32))
        if cluster > 1:
            if lane < cluster:
                mbarrier_arrive_cluster(barriers.empty, stage, u32(lane))
        elif arrives():
            mbarrier_arrive(barriers.empty, stage)

    @verb
    def skip(barriers, i):
        """Release the stage unread, if lanes have not synchronized since they waited for it."""
        bar_warp_sync(FULL_WARP)  # else a lane that still waits could find the stage refilled, and deadlock
        release(barriers, i)

    return members(
        locals(),
        barriers=own.barriers,
        init=own.init,
        claim=own.claim,  # by a warp that writes to the `second_barrier`'s part
    )


@kept_noun
def second_barrier(stages: int, nbytes: int, writers: int = 0) -> Members:
    """The verbs of a second full-barrier for each of `stages`, which `nbytes` of copies and `writers` warps fill.

    `i` numbers the pipeline's fillings. The barriers count the producer, if there are copies, and their bytes; and the
    warps that write. Such a warp waits until the stage is free (`claim`), writes, and arrives. The pipeline's `start`
    makes them visible to all threads.
    """
    STAGES = u32(stages)  # unsigned: no sign handling below

    @verb
    def barriers():
        """Return full, in shared memory; once in a kernel, by all threads."""
        return cuda.shared.array(stages, u64)

    @verb
    def init(full):
        """Initialize the barriers; by one thread, before the pipeline's `start`."""
        for stage in range(stages):
            mbarrier_init(full, stage, (nbytes > 0) + arrivals(writers))

    @verb
    def expect(full, i):
        """Expect the bytes; by the producer, once the pipeline's stage is free. Return the stage."""
        stage = i32(u32(i) % STAGES)
        mbarrier_arrive_expect_tx(full, stage, nbytes)
        return stage

    @verb
    def hand(full, i):
        """Signal that the lanes of my warp have written their data."""
        bar_warp_sync(FULL_WARP)
        if arrives():
            mbarrier_arrive(full, i32(u32(i) % STAGES))

    @verb
    def wait(full, i):
        """Wait until all data have arrived. Return the stage."""
        stage = i32(u32(i) % STAGES)
        mbarrier_wait_cta(full, stage, u32(i) // STAGES & 1)
        return stage

    @verb
    def leave():
        """Let my warp's reads of data that warps wrote happen before the pipeline's release."""
        bar_warp_sync(FULL_WARP)

    return locals()
