"""Synchronize warpgroups so that the products of all can read what each has written to shared memory.

If two warpgroups write one half of a tile each, neither must wait until both halves are complete (`halves`). The second
warpgroup follows the first at a distance, so that one does arithmetic while the other multiplies.
"""

from __future__ import annotations

from ..compiler.backend import Members, i32, kept_noun, members, verb
from ..ptx.async_copy import fence_proxy_async
from ..ptx.warp import bar_arrive, bar_sync, barrier_sync

BARRIER = 3  # number of the named barrier, between those of `epilogue` and those of `pingpong`
READ, READY, BEHIND, BOTH = 4, 6, 8, 256  # barriers of `halves`, without `turns`; threads of both warpgroups


@kept_noun
def warpgroup_barrier(warpgroups: int) -> Members:
    """The verbs of a barrier of 1 or 2 warpgroups. All threads of the warpgroups call them."""
    THREADS = 128 * warpgroups

    @verb
    def meet():
        """Make all writes to shared memory visible to products."""
        fence_proxy_async()
        bar_sync(BARRIER, THREADS)

    @verb
    def gather():
        """Wait until all threads have read."""
        bar_sync(BARRIER, THREADS)

    @verb
    def gather_from_branches():
        """`gather`, if each warpgroup calls it in a branch of its own."""
        barrier_sync(BARRIER, THREADS)

    return locals()


@verb
def meet_alone(warpgroup):
    """Make this warpgroup's writes visible to its own products; by all its threads. warpgroup: 0 or 1."""
    fence_proxy_async()
    bar_sync(1 + warpgroup, 128)  # a barrier of `epilogue`, which the same threads use


@kept_noun
def halves() -> Members:
    """The verbs of two warpgroups that write one half of each tile.

    All threads of a warpgroup call each verb once per tile, and `hand` once before the first tile. warpgroup: 0 or 1.
    """

    @verb
    def hand(warpgroup):
        """Signal that my half is complete for the products of both."""
        fence_proxy_async()
        bar_arrive(i32(READY + warpgroup), BOTH)

    @verb
    def take(warpgroup):
        """Wait until both halves are complete."""
        bar_sync(i32(READY + 1 - warpgroup), BOTH)

    @verb
    def leave(warpgroup):
        """Signal that I have read both halves."""
        bar_arrive(i32(READ + warpgroup), BOTH)

    @verb
    def claim(warpgroup):
        """Wait until the other warpgroup has read my half, so that I may overwrite it."""
        bar_sync(i32(READ + 1 - warpgroup), BOTH)

    @verb
    def follow(warpgroup):
        """Wait until the first warpgroup has called `go_ahead` for this tile."""
        if warpgroup == 1:
            bar_sync(BEHIND, BOTH)

    @verb
    def go_ahead(warpgroup):
        """Let the second warpgroup read what the first one has written so far."""
        if warpgroup == 0:
            bar_arrive(BEHIND, BOTH)

    return locals()


@kept_noun
def in_step() -> Members:
    """The verbs of `halves` for two warpgroups that meet after each tile, and do the same at the same time."""
    both = warpgroup_barrier(2)

    @verb
    def hand(warpgroup):
        both.meet()

    @verb
    def claim(warpgroup):
        both.gather()

    @verb
    def _nothing(warpgroup):
        """Do nothing: the other verbs wait for both."""

    return members(locals(), take=_nothing, leave=_nothing, follow=_nothing, go_ahead=_nothing)
