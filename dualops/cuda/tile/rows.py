"""Verbs that reduce over the threads that share a row: lanes of a warp, warps of a block, blocks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..backend import cuda, verb
from ..ptx import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from .numbers import numbers

FULL_WARP = 0xFFFFFFFF


class LaneReductions(NamedTuple):
    """Reductions over `lanes` neighbouring lanes (a power of two up to 32); every lane gets the result."""

    max: Callable[..., Any]
    sum: Callable[..., Any]


@cache
def lane_reductions(number: Any, lanes: int) -> LaneReductions:
    """The verbs for numbers of type f32 or f64. All 32 lanes of the warp must call them."""
    maximum, shuffle = numbers(number).maximum, numbers(number).shuffle
    STEPS = lanes.bit_length() - 1

    @verb
    def lanes_max(x):
        for step in range(STEPS):
            x = maximum(x, shuffle(x, 1 << step, FULL_WARP))
        return x

    @verb
    def lanes_sum(x):
        for step in range(STEPS):
            x += shuffle(x, 1 << step, FULL_WARP)
        return x

    return LaneReductions(lanes_max, lanes_sum)


class WarpParts(NamedTuple):
    """How the warps of a row, in one block or in several of a cluster, put their parts together.

    A row's parts stand side by side in a shared array, `count` of them; every block of the cluster has them all.
    """

    count: int  # parts of a row: warps * cluster
    lanes: int  # lanes that read them: each reads count // lanes
    enter: Callable[..., None]  # (): once, before anything is shared
    share: Callable[..., None]  # (parts, first, warp, lane, value): my warp's part, to every block
    meet: Callable[..., None]  # (): everything shared is visible


@cache
def warp_parts(number: Any, warps: int, cluster: int) -> WarpParts:
    """The verbs for rows of `warps` warps in each of `cluster` blocks."""
    store_cluster = numbers(number).store_cluster
    WARPS, CLUSTER = warps, cluster

    @verb
    def nothing():
        pass

    @verb
    def share_in_block(parts, first, warp, lane, value):
        if lane == 0:
            parts[first + warp] = value

    @verb
    def share_in_cluster(parts, first, warp, lane, value):
        if lane < CLUSTER:
            store_cluster(parts, first + cluster_ctarank() * WARPS + warp, lane, value)

    @verb
    def meet_in_block():
        cuda.syncthreads()

    @verb
    def meet_in_cluster():
        barrier_cluster_arrive()
        barrier_cluster_wait()

    @verb
    def enter_cluster():  # a block's shared memory may be written once it runs
        barrier_cluster_arrive()
        barrier_cluster_wait()

    count = warps * cluster
    if cluster == 1:
        return WarpParts(count, min(count, 32), nothing, share_in_block, meet_in_block)
    return WarpParts(count, min(count, 32), enter_cluster, share_in_cluster, meet_in_cluster)
