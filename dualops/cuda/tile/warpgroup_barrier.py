"""Warpgroups that multiply meet: what each has written to shared memory is then there for the products of all.

Of two that each write a half of it, tile after tile, neither need wait until both are there (`halves`): the second one
stays behind the first, so that one does arithmetic while the other multiplies.
"""

from __future__ import annotations

from functools import cache

from ..compiler.backend import Members, i32, noun, verb
from ..ptx.fences import fence_proxy_async
from ..ptx.warp import bar_arrive, bar_sync

BARRIER = 3  # of the named ones, between `epilogue`'s and those of `pingpong`
READ, READY, BEHIND, BOTH = 4, 6, 8, 256  # those of halves, which take no `turns`; threads of both warpgroups


@cache
@noun
def warpgroup_barrier(warpgroups: int) -> Members:
    """The verbs of a barrier of 1 or 2 warpgroups.

    Called by all threads of the warpgroups.
    """
    THREADS = 128 * warpgroups

    @verb
    def meet():
        """Make what was written visible to products."""
        fence_proxy_async()
        bar_sync(BARRIER, THREADS)

    @verb
    def gather():
        """Wait until nobody reads any more."""
        bar_sync(BARRIER, THREADS)

    return locals()


@verb
def meet_alone(warpgroup):
    """By all threads of this warpgroup, 0 or 1: what it has written is there for its own products."""
    fence_proxy_async()
    bar_sync(1 + warpgroup, 128)  # that of `epilogue`, which the same threads come to


@cache
@noun
def halves() -> Members:
    """The verbs of two warpgroups.

    Called by all threads of warpgroup 0 or 1, each once a tile, and `hand` once before the first.
    """

    @verb
    def hand(warpgroup):
        """Signal that my half is there for the products of both."""
        fence_proxy_async()
        bar_arrive(i32(READY + warpgroup), BOTH)

    @verb
    def take(warpgroup):
        """Wait until both halves are there."""
        bar_sync(i32(READY + 1 - warpgroup), BOTH)

    @verb
    def leave(warpgroup):
        """Signal that I have read both halves."""
        bar_arrive(i32(READ + warpgroup), BOTH)

    @verb
    def claim(warpgroup):
        """Wait until the other warpgroup has read mine, before I write it."""
        bar_sync(i32(READ + 1 - warpgroup), BOTH)

    @verb
    def follow(warpgroup):
        """Wait until the first warpgroup has gone ahead in this tile."""
        if warpgroup == 1:
            bar_sync(BEHIND, BOTH)

    @verb
    def go_ahead(warpgroup):
        """Let the second warpgroup read what the first one has written so far."""
        if warpgroup == 0:
            bar_arrive(BEHIND, BOTH)

    return locals()
