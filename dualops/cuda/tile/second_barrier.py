"""A second full-barrier per stage of a pipeline: a part of the stage may arrive later. One release frees both.

    producer                                    readers
    stage = pipe.acquire(barriers, i)           stage = pipe.wait(barriers, i)
    tile.load(smem, stage, ..., barriers.full)  ...
    part.expect(full, i)                        part.wait(full, i)
    other_tile.load(smem, stage, ..., full)     ...
                                                part.leave()
                                                pipe.release(barriers, i)

The kernels that own keys use one alone, with a single stage, for K and V. It may have more stages than the pipeline. If
the pipeline's stage is free, the stage here is free, too.

Its mbarriers count the producer and the bytes of its copies, if there are any, and the warps that write to the part.
Such a warp waits until the stage is free (`pipe.claim`), writes, and arrives. The pipeline's `start` makes the
mbarriers visible to all threads.
"""

from __future__ import annotations

from ..compiler.backend import Members, cuda, i32, kept_noun, u32, u64, verb
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta
from ..ptx.warp import bar_warp_sync
from .pipeline import arrivals, arrives
from .rows import FULL_WARP


@kept_noun
def second_barrier(stages: int, nbytes: int, writers: int = 0) -> Members:
    """The verbs for `stages` stages, which `nbytes` of copies and `writers` warps fill.

    `i` numbers the pipeline's fillings.
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
