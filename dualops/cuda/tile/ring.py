"""A ring of stages in shared memory: one thread fills them with bulk copies, warps read and release them.

    full[stage]    its bytes have landed                 1 arrival, by who starts the copy, and the bytes
    empty[stage]   everybody has read it                 1 arrival a warp

Copy number `i` uses stage i % stages in round i // stages. Rounds end in turn, so a round's parity is enough to wait
for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, i32, u32, verb
from ..ptx.async_copy import cp_async_bulk
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_cta,
)
from ..ptx.warp import (
    bar_sync,
    bar_warp_sync,
    barrier_cluster_arrive,
    barrier_cluster_wait,
    cluster_ctarank as cluster_ctarank,
)
from .rows import FULL_WARP


class Ring(Namespace):
    """The verbs; `full`, `empty` are shared arrays of `stages` mbarriers, `i` numbers the copies."""

    init: Callable[..., None]  # (full, empty): by one thread, before `start`
    acquire: Callable[..., Any]  # (full, empty, i, nbytes) -> stage: wait until it is free; `nbytes` will come
    copy: Callable[..., None]  # (smem, at, x, index, nbytes, full, stage): start a copy into the stage
    wait: Callable[..., Any]  # (full, i) -> stage: wait until its bytes are there
    release: Callable[..., None]  # (empty, stage): my warp has read it


@cache
def ring(stages: int, warps: int) -> Ring:
    """The verbs of a ring that `warps` warps read."""
    STAGES, COUNT, WARPS = u32(stages), stages, warps  # u32: no sign to look after in what follows

    @verb
    def init(full, empty):
        for stage in range(COUNT):
            mbarrier_init(full, stage, 1)
            mbarrier_init(empty, stage, WARPS)

    @verb
    def acquire(full, empty, i, nbytes):
        stage = i32(u32(i) % STAGES)
        mbarrier_wait_cta(empty, stage, u32(i) // STAGES & 1 ^ 1)  # the round before; a new barrier's is over
        mbarrier_arrive_expect_tx(full, stage, nbytes)
        return stage

    @verb
    def copy(smem, at, x, index, nbytes, full, stage):
        cp_async_bulk(smem, at, x, index, nbytes, full, stage)

    @verb
    def wait(full, i):
        stage = i32(u32(i) % STAGES)
        mbarrier_wait_cta(full, stage, u32(i) // STAGES & 1)
        return stage

    @verb
    def release(empty, stage):
        bar_warp_sync(FULL_WARP)
        if cuda.threadIdx.x % 32 == 0:
            mbarrier_arrive(empty, stage)

    return Ring(init=init, acquire=acquire, copy=copy, wait=wait, release=release)


@verb
def init_fetch(bell):
    """Make the mbarrier of copies that are waited for once; by one thread, before `start_cluster`."""
    mbarrier_init(bell, 0, 1)


@verb
def start_fetch(bell, nbytes):
    """So many bytes will come; by one thread."""
    mbarrier_arrive_expect_tx(bell, 0, nbytes)


@verb
def fetch(smem, at, x, index, nbytes, bell):
    """Start one of the copies."""
    cp_async_bulk(smem, at, x, index, nbytes, bell, 0)


@verb
def wait_fetch(bell):
    """Wait until all their bytes are there."""
    mbarrier_wait_cta(bell, 0, 0)


@verb
def start_cluster():
    """Make initialised mbarriers visible, and know that every block of the cluster runs."""
    fence_mbarrier_init()
    barrier_cluster_arrive()
    barrier_cluster_wait()


class Parts(Namespace):
    """How the reading warps of a cluster put pairs of numbers together, row after row, without stopping the copies.

    `pairs` is a shared array of two rows' parts, so that nobody writes what a slower warp still reads; `bells` holds
    two mbarriers, for parts from other blocks; `row_round` numbers the rows. A block may have several rows at once,
    each with warps and a barrier of its own.
    """

    size: int  # pairs of a row, or of all the rows of a block
    init: Callable[..., None]  # (bells)
    send: Callable[..., None]  # (pairs, bells, row_round, rank, warp, lane, a, b): my warp's pair, to every block
    wait: Callable[..., Any]  # (bells, row_round) -> where this row's parts begin in `pairs`


@cache
def parts(number: Any, send_pair: Callable[..., None], warps: int, cluster: int, rows: int = 1) -> Parts:
    """The verbs for `warps` warps a row in each of `cluster` blocks; in one block, for up to 14 rows at once."""
    return _parts_in_block(warps, rows) if cluster == 1 else _parts_in_cluster(number, send_pair, warps, cluster)


def _parts_in_block(warps: int, rows: int) -> Parts:
    WARPS, SIZE, THREADS = warps, warps * rows, 32 * warps

    @verb
    def init(bells):
        pass

    @verb
    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        if lane == 0:
            pairs[((row_round & 1) * SIZE + warp) * 2] = a
            pairs[((row_round & 1) * SIZE + warp) * 2 + 1] = b

    @verb
    def wait(bells, row_round):
        row = cuda.threadIdx.x // THREADS if SIZE > WARPS else 0
        bar_sync(1 + row, THREADS)  # the copying warp goes on
        return ((row_round & 1) * SIZE + row * WARPS) * 2

    return Parts(size=SIZE, init=init, send=send, wait=wait)


def _parts_in_cluster(number: Any, send_pair: Callable[..., None], warps: int, cluster: int) -> Parts:
    WARPS, CLUSTER, COUNT = warps, cluster, warps * cluster
    NBYTES = COUNT * number.bitwidth // 4

    @verb
    def init(bells):
        mbarrier_init(bells, 0, 1)
        mbarrier_init(bells, 1, 1)

    @verb
    def send(pairs, bells, row_round, rank, warp, lane, a, b):
        half = row_round & 1
        if (warp == 0) & (lane == 0):
            mbarrier_arrive_expect_tx(bells, half, NBYTES)
        if lane < CLUSTER:
            send_pair(pairs, (half * COUNT + rank * WARPS + warp) * 2, i32(lane), a, b, bells, half)

    @verb
    def wait(bells, row_round):
        half = row_round & 1
        mbarrier_wait(bells, half, row_round // 2 & 1)
        return half * COUNT * 2

    return Parts(size=COUNT, init=init, send=send, wait=wait)
