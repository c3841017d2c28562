"""Warpgroups that multiply meet: what each has written to shared memory is then there for the products of all.

Of two that each write a half of it, tile after tile, neither need wait until both are there (`Halves`): the second one
stays behind the first, so that one does arithmetic while the other multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, i32, verb
from ..ptx.fences import fence_proxy_async
from ..ptx.warp import bar_arrive, bar_sync

BARRIER = 3  # of the named ones, between `epilogue`'s and those of `turns`
READ, READY, BEHIND, BOTH = 4, 6, 8, 256  # those of halves, which take no `turns`; threads of both warpgroups


class Meeting(Namespace):
    """The verbs, by all threads of the warpgroups."""

    meet: Callable[..., None]  # (): what was written is there for products
    gather: Callable[..., None]  # (): nobody reads any more


@cache
def meeting(warpgroups: int) -> Meeting:
    """The verbs of so many, 1 or 2."""
    THREADS = 128 * warpgroups

    @verb
    def meet():
        fence_proxy_async()
        bar_sync(BARRIER, THREADS)

    @verb
    def gather():
        bar_sync(BARRIER, THREADS)

    return Meeting(meet=meet, gather=gather)


@verb
def meet_alone(warpgroup):
    """By all threads of this warpgroup, 0 or 1: what it has written is there for its own products."""
    fence_proxy_async()
    bar_sync(1 + warpgroup, 128)  # that of `epilogue`, which the same threads come to


class Halves(Namespace):
    """The verbs, by all threads of warpgroup 0 or 1, each once a tile, and `hand` once before the first."""

    hand: Callable[..., None]  # (warpgroup): my half is there for the products of both
    take: Callable[..., None]  # (warpgroup): wait until all of both halves is there
    leave: Callable[..., None]  # (warpgroup): I have read both
    claim: Callable[..., None]  # (warpgroup): wait until the other one has, and write mine
    follow: Callable[..., None]  # (warpgroup): wait, of this tile, until the first has gone ahead
    go_ahead: Callable[..., None]  # (warpgroup): what the first has written until now the second may read


@cache
def halves() -> Halves:
    """Of two warpgroups."""

    @verb
    def hand(warpgroup):
        fence_proxy_async()
        bar_arrive(i32(READY + warpgroup), BOTH)

    @verb
    def take(warpgroup):
        bar_sync(i32(READY + 1 - warpgroup), BOTH)

    @verb
    def leave(warpgroup):
        bar_arrive(i32(READ + warpgroup), BOTH)

    @verb
    def claim(warpgroup):
        bar_sync(i32(READ + 1 - warpgroup), BOTH)

    @verb
    def follow(warpgroup):
        if warpgroup == 1:
            bar_sync(BEHIND, BOTH)

    @verb
    def go_ahead(warpgroup):
        if warpgroup == 0:
            bar_arrive(BEHIND, BOTH)

    return Halves(hand=hand, take=take, leave=leave, claim=claim, follow=follow, go_ahead=go_ahead)
