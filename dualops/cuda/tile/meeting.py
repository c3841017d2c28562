"""Warpgroups that multiply meet: what each has written to shared memory is then there for the products of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, verb
from ..ptx.fences import fence_proxy_async
from ..ptx.warp import bar_sync
from .warpgroup import my_warpgroup

BARRIER = 3  # of the named ones, between `epilogue`'s and those of `turns`


class Meeting(Namespace):
    """The verbs, by all threads of the warpgroups."""

    meet: Callable[..., None]  # (): what was written is there for products
    gather: Callable[..., None]  # (): nobody reads any more


@cache
def meeting(warpgroups: int, *, apart: bool = False) -> Meeting:
    """The verbs of so many, 1 or 2; apart: each meets with itself, where `epilogue`'s barriers let it."""
    THREADS = 128 if apart else 128 * warpgroups

    @verb
    def own():
        return 1 + my_warpgroup()

    @verb
    def common():
        return BARRIER

    barrier = own if apart else common

    @verb
    def meet():
        fence_proxy_async()
        bar_sync(barrier(), THREADS)

    @verb
    def gather():
        bar_sync(barrier(), THREADS)

    return Meeting(meet=meet, gather=gather)
