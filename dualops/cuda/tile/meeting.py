"""Warpgroups that multiply meet: what each has written to shared memory is then there for the products of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, verb
from ..ptx.fences import fence_proxy_async
from ..ptx.warp import bar_sync

BARRIER = 3  # of the named ones, between `epilogue`'s and those of `turns`


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
