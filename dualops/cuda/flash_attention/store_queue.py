"""Places of shared memory that warps fill, and that one thread empties by copies to memory.

    warps                                       thread
    place = box.claim(barriers, i)              place = box.take(barriers, i)
    ...                                         ...
    box.hand(barriers, i)                       box.free(barriers, i)

Fillings are numbered, `i`; filling i is in place i % places, in the phase i // places of its two mbarriers.
"""

from __future__ import annotations

from functools import cache

from ..compiler.backend import Members, cuda, i32, noun, u32, u64, verb
from ..ptx.fences import fence_proxy_async
from ..ptx.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait_cta
from ..ptx.warp import bar_warp_sync
from ..tile.pipeline import Barriers
from ..tile.rows import FULL_WARP


@cache
@noun
def store_queue(places: int, warps: int) -> Members:
    """The verbs of so many places, each filled by so many warps."""
    PLACES = u32(places)  # no sign to look after in what follows

    @verb
    def barriers():
        """Return the barriers in shared arrays; once in a kernel, by all threads."""
        return Barriers(cuda.shared.array(places, u64), cuda.shared.array(places, u64))

    @verb
    def init(barriers):
        """Initialize the barriers; by one thread, before a pipeline's `start`."""
        for place in range(places):
            mbarrier_init(barriers.full, place, warps)
            mbarrier_init(barriers.empty, place, 1)

    @verb
    def claim(barriers, i):
        """Wait until the place is empty. Return the place."""
        place = i32(u32(i) % PLACES)
        mbarrier_wait_cta(barriers.empty, place, u32(i) // PLACES & 1 ^ 1)
        return place

    @verb
    def hand(barriers, i):
        """Signal that the lanes of my warp have written their share."""
        fence_proxy_async()
        bar_warp_sync(FULL_WARP)
        if u32(cuda.threadIdx.x) % u32(32) == u32(0):
            mbarrier_arrive(barriers.full, i32(u32(i) % PLACES))

    @verb
    def take(barriers, i):
        """Wait until all warps have written theirs; then copies may read it. Return the place."""
        place = i32(u32(i) % PLACES)
        mbarrier_wait_cta(barriers.full, place, u32(i) // PLACES & 1)
        return place

    @verb
    def free(barriers, i):
        """Signal that copies have read the place."""
        mbarrier_arrive(barriers.empty, i32(u32(i) % PLACES))

    return locals()
