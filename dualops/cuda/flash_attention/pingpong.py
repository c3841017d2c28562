"""Warpgroups that take turns: while one starts its products, the others do arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..compiler.backend import Namespace, i32, u32, verb
from ..ptx.warp import bar_arrive, bar_sync

FIRST_BARRIER = 4  # of the named ones; those before are `epilogue`'s


class Turns(Namespace):
    """The verbs, by all threads of a warpgroup, each as often as the other warpgroups call it."""

    begin: Callable[..., None]  # (warpgroup): once, before the first turn
    take: Callable[..., None]  # (warpgroup): wait for it
    give: Callable[..., None]  # (warpgroup): it is the next one's


@cache
def turns(count: int) -> Turns:
    """For so many warpgroups, number 0 first; of one there are no turns."""

    @verb
    def nothing(warpgroup):
        pass

    @verb
    def begin(warpgroup):
        if warpgroup == count - 1:
            bar_arrive(FIRST_BARRIER, 256)

    @verb
    def take(warpgroup):
        bar_sync(i32(FIRST_BARRIER + warpgroup), 256)

    @verb
    def give(warpgroup):
        bar_arrive(i32(FIRST_BARRIER + u32(warpgroup + 1) % u32(count)), 256)

    if count == 1:
        return Turns(begin=nothing, take=nothing, give=nothing)
    return Turns.from_locals(locals())
