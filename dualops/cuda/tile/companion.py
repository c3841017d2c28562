"""A second part of a pipeline's stages, which readers wait for later, and give back with the first.

    producer                                    readers
    stage = pipe.acquire(barriers, i)           stage = pipe.wait(barriers, i)
    tile.load(smem, stage, ..., barriers.full)  ...
    part.expect(full, i)                        part.wait(full, i)
    other_tile.load(smem, stage, ..., full)     ...
                                                part.leave()
                                                pipe.release(barriers, i)

It may have more stages than the pipeline, whose stage then tells the producer that this one's is free, too.

Its mbarriers count the producer, the bytes of the copies, and warps that write to the part beside them: each waits
until the stage is free (`pipe.claim`), writes, and hands it on. They are told to all by the pipeline's `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, i32, u32, u64, verb
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta
from ..ptx.warp import bar_warp_sync
from .rows import FULL_WARP


class Companion(Namespace):
    """The verbs; i numbers the pipeline's fillings."""

    barriers: Callable[..., object]  # () -> full, in shared memory; once in a kernel, by all threads
    init: Callable[..., None]  # (full): by one thread, before the pipeline's `start`
    expect: Callable[..., Any]  # (full, i) -> stage: by the producer, once the pipeline's is free
    hand: Callable[..., None]  # (full, i): the lanes of my warp have written their share
    wait: Callable[..., Any]  # (full, i) -> stage: until all of it is there
    leave: Callable[..., None]  # (): my warp's lanes have read what warps wrote; before the pipeline's release


@cache
def companion(stages: int, nbytes: int, writers: int = 0) -> Companion:
    """The verbs for `nbytes` of copies in each of so many stages, beside which so many warps write."""
    STAGES = u32(stages)  # no sign to look after in what follows

    @verb
    def barriers():
        return cuda.shared.array(stages, u64)

    @verb
    def init(full):
        for stage in range(stages):
            mbarrier_init(full, stage, 1 + writers)

    @verb
    def expect(full, i):
        stage = i32(u32(i) % STAGES)
        mbarrier_arrive_expect_tx(full, stage, nbytes)
        return stage

    @verb
    def hand(full, i):
        bar_warp_sync(FULL_WARP)
        if u32(cuda.threadIdx.x) % u32(32) == u32(0):
            mbarrier_arrive(full, i32(u32(i) % STAGES))

    @verb
    def wait(full, i):
        stage = i32(u32(i) % STAGES)
        mbarrier_wait_cta(full, stage, u32(i) // STAGES & 1)
        return stage

    @verb
    def leave():
        bar_warp_sync(FULL_WARP)

    return Companion(barriers=barriers, init=init, expect=expect, hand=hand, wait=wait, leave=leave)
