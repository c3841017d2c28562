"""Mutants of the ring of stages: who copies, who reads, how it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dualops.cuda.backend import cuda
from dualops.cuda.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait
from dualops.cuda.ptx.warp import bar_warp_sync
from dualops.cuda.simulator import current
from dualops.cuda.tile.rows import FULL_WARP

from .protocol import NAN, NOT_THERE, ROWS, STUCK, TOO_MANY, VALUE, WRONG, Sizes, mutant

# --- the ring: who copies ----------------------------------------------------------------------------


def _acquire(sizes: Sizes, parity: Callable[[int], int]) -> dict[str, Any]:
    def acquire(full, empty, i, nbytes):
        stage = i % sizes.stages
        mbarrier_wait(empty, stage, parity(i // sizes.stages))
        mbarrier_arrive_expect_tx(full, stage, nbytes)
        return stage

    return {"acquire": acquire}


@mutant("ring", TOO_MANY)
def empty_parity_never_changes(right, sizes):
    return _acquire(sizes, lambda ring_round: 1)


@mutant("ring", TOO_MANY)
def waits_one_copy_too_early_for_empty(right, sizes):
    def acquire(full, empty, i, nbytes):
        before = max(i - 1, 0)
        mbarrier_wait(empty, before % sizes.stages, before // sizes.stages & 1 ^ 1)
        mbarrier_arrive_expect_tx(full, i % sizes.stages, nbytes)
        return i % sizes.stages

    return {"acquire": acquire}


@mutant("ring", rf"{STUCK}|copies are still under way")
def expects_nothing(right, sizes):
    def acquire(full, empty, i, nbytes):
        stage = i % sizes.stages
        mbarrier_wait(empty, stage, i // sizes.stages & 1 ^ 1)
        mbarrier_arrive(full, stage)
        return stage

    return {"acquire": acquire}


@mutant("ring", VALUE)
def copies_the_same_row_again(right, sizes):
    def copy(smem, at, x, index, nbytes, full, stage):
        right.copy(smem, at, x, index % (x.size // ROWS), nbytes, full, stage)

    return {"copy": copy}


@mutant("ring", STUCK)
def copies_half(right, sizes):
    def copy(smem, at, x, index, nbytes, full, stage):
        right.copy(smem, at, x, index, nbytes // 2, full, stage)

    return {"copy": copy}


@mutant("ring", STUCK)
def copies_one_stage_only(right, sizes):
    def copy(smem, at, x, index, nbytes, full, stage):
        if stage == 0:
            right.copy(smem, at, x, index, nbytes, full, stage)

    return {"copy": copy}


# --- the ring: who reads -----------------------------------------------------------------------------


def _wait(sizes: Sizes, parity: Callable[[int], int]) -> dict[str, Any]:
    def wait(full, i):
        mbarrier_wait(full, i % sizes.stages, parity(i // sizes.stages))
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", rf"{TOO_MANY}|{STUCK}")
def full_parity_never_changes(right, sizes):
    return _wait(sizes, lambda ring_round: 0)


@mutant("ring", rf"{TOO_MANY}|{STUCK}")
def waits_for_the_copy_before(right, sizes):
    def wait(full, i):
        if i:
            right.wait(full, i - 1)
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", NAN)
def one_lane_waits_for_full(right, sizes):
    def wait(full, i):
        if cuda.threadIdx.x % 32 == 0:
            right.wait(full, i)
        return i % sizes.stages

    return {"wait": wait}


@mutant("ring", WRONG)
def reads_the_stage_before(right, sizes):
    return {"wait": lambda full, i: (right.wait(full, i) + sizes.stages - 1) % sizes.stages}


@mutant("ring", STUCK)
def released_by_one_warp(right, sizes):
    def release(empty, stage):
        if cuda.threadIdx.x < 32:
            right.release(empty, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_by_every_lane(right, sizes):
    def release(empty, stage):
        bar_warp_sync(FULL_WARP)
        mbarrier_arrive(empty, stage)

    return {"release": release}


@mutant("ring", TOO_MANY)
def released_twice(right, sizes):
    def release(empty, stage):
        right.release(empty, stage)
        right.release(empty, stage)

    return {"release": release}


@mutant("ring", rf"{NAN}|{STUCK}")
def released_before_it_is_read(right, sizes):
    """At the wait: in backward at the first of two."""
    rings, released = {}, set()

    def init(full, empty):
        right.init(full, empty)
        rings[current().block] = empty

    def wait(full, i):
        stage = right.wait(full, i)
        if (current(), i) not in released:
            released.add((current(), i))
            right.release(rings[current().block], stage)
        return stage

    return {"init": init, "wait": wait, "release": lambda empty, stage: None}


# --- the ring: its beginning -------------------------------------------------------------------------


@mutant("ring", NOT_THERE)
def last_stage_not_initialised(right, sizes):
    def init(full, empty):
        for stage in range(sizes.stages - 1):
            mbarrier_init(full, stage, 1)
            mbarrier_init(empty, stage, sizes.warps)

    return {"init": init}
